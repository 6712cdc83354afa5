"""Time and memory of a private step: ``python -m benchmarks --help``."""
