"""Folders of finished runs, as the callback and Lightning's loggers leave them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_lap2.report import GENERAL_CAVEATS, PrivacyReport

REPORT: dict[str, Any] = {
    "eps": 3.0,
    "epsilon": 2.5,
    "delta": 1e-5,
    "mechanism": "laplace",
    "bound": "tight",
    "adjacency": "add/remove one example",
    "sampling": "poisson",
    "clipping": "flat",
    "max_grad_norm": 1.0,
    "noise_multiplier": 1.5,
    "scale": 1.5,
    "sample_rate": 0.01,
    "expected_batch_size": 100,
    "num_examples": 10_000,
    "dimension": 26_010,
    "steps": 40,
    "planned_steps": 50,
    "best_order": 7.0,
    "engine": "ghost",
    "augmentations": 1,
    "noise_source": "aes",
    "noise_seed": None,
    "reproducible": False,
    "precision": "32-true",
    "world_size": 1,
    "caveats": list(GENERAL_CAVEATS),
    "versions": {"lightning-lap2": "0.1.0"},
}

ADAPTIVE = {
    "clipping": "adaptive",
    "clipping_threshold": 0.5,
    "target_quantile": 0.5,
    "clip_learning_rate": 0.2,
    "count_noise_scale": 5.0,
    "epsilon_without_count": 2.4,
}


def write_report_file(folder: Path, name: str = "privacy_report.json", **changes: Any) -> PrivacyReport:
    folder.mkdir(parents=True, exist_ok=True)
    report = PrivacyReport.from_dict(REPORT | changes)
    (folder / name).write_text(json.dumps(report.to_dict()))
    return report


def log(folder: Path, logger: type[TensorBoardLogger] | type[CSVLogger], metrics: dict[str, list[float]]) -> None:
    """``metrics`` at steps 0, 10, 20, ..."""
    writer = logger(folder.parent.parent, name=folder.parent.name, version=folder.name)
    for number, values in enumerate(zip(*metrics.values(), strict=True)):
        writer.log_metrics(dict(zip(metrics, values, strict=True)), 10 * number)
        writer.log_metrics({"val_accuracy": 0.5}, 10 * number)
    writer.save()
    writer.finalize("success")
