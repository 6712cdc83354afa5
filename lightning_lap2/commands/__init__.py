"""What the larger subcommands of ``lightning-lap2`` do; :mod:`lightning_lap2.cli` puts them together."""
