"""``Lap2Privacy`` for the ``pytorch_lightning`` namespace; checkpoints are interchangeable with the other."""

from __future__ import annotations

import pytorch_lightning as pl

from lightning_lap2.callback.core import Lap2Core


class Lap2Privacy(Lap2Core, pl.Callback):
    """See :class:`lightning_lap2.Lap2Privacy`; the same callback for ``pytorch_lightning.Trainer``."""

    _pl = pl
