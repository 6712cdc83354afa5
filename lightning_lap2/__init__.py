"""Differentially private training of unmodified LightningModules: Laplace noise, l2 clipping.

``Lap2Privacy`` is the callback for ``lightning.pytorch``; ``lightning_lap2.pytorch_lightning.Lap2Privacy`` is
the same for the ``pytorch_lightning`` namespace. ``lightning_lap2.accounting`` needs neither torch nor Lightning,
which is why the names below are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_lap2._lazy import lazy
from lightning_lap2._version import __version__

if TYPE_CHECKING:
    from lightning_lap2.batches import register_batch_type
    from lightning_lap2.errors import IsolationError, UnsupportedModelError, UnsupportedSettingError
    from lightning_lap2.gradients.norms import gradient_norms, suggest_max_grad_norm
    from lightning_lap2.gradients.suggest import suggest
    from lightning_lap2.lightning import Lap2Privacy
    from lightning_lap2.report import PrivacyReport

__all__ = [
    "IsolationError", "Lap2Privacy", "PrivacyReport", "UnsupportedModelError", "UnsupportedSettingError", "__version__",
    "gradient_norms", "register_batch_type", "suggest", "suggest_max_grad_norm",
]  # fmt: skip

_HOMES = {
    "IsolationError": "lightning_lap2.errors",
    "UnsupportedModelError": "lightning_lap2.errors",
    "UnsupportedSettingError": "lightning_lap2.errors",
    "Lap2Privacy": "lightning_lap2.lightning",
    "PrivacyReport": "lightning_lap2.report",
    "register_batch_type": "lightning_lap2.batches",
    "gradient_norms": "lightning_lap2.gradients.norms",
    "suggest": "lightning_lap2.gradients.suggest",
    "suggest_max_grad_norm": "lightning_lap2.gradients.norms",
}

__getattr__, __dir__ = lazy(__name__, _HOMES, __all__)
