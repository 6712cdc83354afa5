"""The Lightning glue: where a batch becomes a noised gradient and where epsilon is charged.

``hooks`` holds the hooks, ``preparing`` a fit until its plan stands, ``session`` its steps; ``release/`` makes a
release, ``ledger/`` keeps what was charged, ``trainer/`` alone touches what is Lightning's own.

Nothing here imports Lightning: the namespace (``lightning.pytorch`` or
``pytorch_lightning``) is handed in by the two thin modules ``lightning_lap2.lightning`` and
``lightning_lap2.pytorch_lightning``.
"""
