"""Callbacks for `fit`: `unisono.callbacks`. Names are loaded when they are first used."""

from __future__ import annotations

import importlib
from typing import Any

#: Where each public name lives.
_HOMES = {
    "BackupAndRestore": "_backup",
    "StepTimer": "_timer",
    "TensorBoard": "_tensorboard",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 (computed, and tested)


def __getattr__(name: str) -> Any:
    module = _HOMES.get(name)
    if module is None:
        raise AttributeError(f"module 'unisono.callbacks' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"unisono.callbacks.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
