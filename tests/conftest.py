"""One thread per process: the tests are small, and ``make test`` runs one worker per core."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
# models are built from configurations; nothing is fetched
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", os.environ.get("LIGHTNING_LAP2_TEST_DEVICES", ""))
