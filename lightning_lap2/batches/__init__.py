"""What a data loader hands on, as examples that can be taken one at a time (torch only).

An *example* is what enters a release with one coin: a record of the data set, or its K views. The user's code gets it
as the batch of one that the user's own ``collate_fn`` makes of that record alone.
"""

from __future__ import annotations

from lightning_lap2.batches.containers import Flat, flatten, register_batch_type
from lightning_lap2.batches.examples import ExampleBatch, Examples
from lightning_lap2.batches.rows import split_rows

__all__ = ["ExampleBatch", "Examples", "Flat", "flatten", "register_batch_type", "split_rows"]
