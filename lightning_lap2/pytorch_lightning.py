"""``Lap2Privacy`` for the ``pytorch_lightning`` namespace; checkpoints are interchangeable with the other."""

from __future__ import annotations

import pytorch_lightning as pl

from lightning_lap2.callback.hooks import Lap2Hooks


class Lap2Privacy(Lap2Hooks, pl.Callback):
    """See :class:`lightning_lap2.Lap2Privacy`; the same callback for ``pytorch_lightning.Trainer``."""

    _pl = pl
