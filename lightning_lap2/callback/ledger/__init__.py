"""What was charged, and where it is kept: in memory, in checkpoints, in the journal, on the module."""
