"""The errors that say what cannot be trained privately, and what to use instead."""

from __future__ import annotations

__all__ = ["IsolationError", "UnsupportedModelError", "UnsupportedSettingError"]


class UnsupportedSettingError(ValueError):
    """A setting of Trainer, callback, loader or module that is not proven sound; the message names it, its value and
    what to use instead."""


class UnsupportedModelError(RuntimeError):
    """The model, batch or loss cannot be trained privately as it is; the message says what to change."""


class IsolationError(UnsupportedModelError):
    """Some code let one record reach another record's gradient: no engine may train on it."""
