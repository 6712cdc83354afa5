"""The Lightning glue: where a batch becomes a noised gradient and where epsilon is charged.

``core`` holds the hooks, ``session`` one fit from its first check to its last release, ``patches`` everything that
is patched in the Trainer. Nothing here imports Lightning: the namespace (``lightning.pytorch`` or
``pytorch_lightning``) is handed in by the two thin modules ``lightning_lap2.lightning`` and
``lightning_lap2.pytorch_lightning``.
"""
