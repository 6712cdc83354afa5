"""One thread per process: the tests are small, and ``make test`` runs one worker per core."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
# models are built from configurations; nothing is fetched
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", os.environ.get("LIGHTNING_LAP2_TEST_DEVICES", ""))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Data and weights of a test are the same each time. The library's noise and draws are not touched by this."""
    import torch

    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (the state that users' code draws from)
    torch.manual_seed(0)
