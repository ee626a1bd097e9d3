"""What the first of several workers prints before `fit`: who computes what, and where it is saved.

Tests: tests/cluster/test_chief.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import keras

from unisono._types import UserValue


def run_summary(
    arguments: Mapping[str, UserValue],
    callbacks: Sequence[keras.callbacks.Callback],
    data: Mapping[str, str],
    platform: str,
    replicas: int,
    workers: int,
) -> str:
    """Return a block of lines about a call of `fit`.

    >>> data = {"x": "ndarray (1797, 64)", "validation_data": "tuple (99, 64) (99,)"}
    >>> print(run_summary({"batch_size": 50, "epochs": 3}, [], data, "cpu", 3, 3))
    unisono: fit on 3 replicas: 3 workers, each with 1 cpu device
      global batch  50 rows, 16 or 17 for each replica
      data          ndarray (1797, 64)
      validation    tuple (99, 64) (99,)
      epochs        1 to 3
      checkpoints   none: a failure restarts training from scratch (BackupAndRestore("backup") resumes it)
    """
    # Without data, Keras raises its own error next.
    x = data.get("x", "none")
    first, last = int(arguments.get("initial_epoch") or 0) + 1, int(arguments.get("epochs") or 1)
    every = arguments.get("steps_per_epoch")
    rows = {
        "global batch": _batch(arguments.get("batch_size"), x, replicas),
        "data": x,
        "validation": data.get("validation_data") or _share(arguments.get("validation_split")),
        "epochs": (str(first) if first == last else f"{first} to {last}")
        + (f", {every} steps each" if every else ""),
        "checkpoints": ", ".join(filter(None, map(_checkpoint, callbacks)))
        or 'none: a failure restarts training from scratch (BackupAndRestore("backup") resumes it)',
    }
    devices = replicas // workers
    lines = [
        f"unisono: fit on {replicas} replicas: {workers} workers, each with {devices} {platform} "
        f"device{'s' if devices > 1 else ''}"
    ]
    return "\n".join([*lines, *(f"  {name:13} {value}" for name, value in rows.items() if value)])


def _batch(size: int | None, x: str, replicas: int) -> str:
    """Return how many rows a step has; data that make batches themselves know it better than Keras' default.

    >>> _batch(None, "ndarray (9, 2)", 2), _batch(None, "Dataset 4 batches", 2)
    ('32 rows, 16 for each replica', 'as the data make them, divided among 2 replicas')
    """
    if size is None and "(" not in x:
        return f"as the data make them, divided among {replicas} replicas"
    size = 32 if size is None else int(size)
    least, rest = divmod(size, replicas)
    return f"{size} rows, {f'{least} or {least + 1}' if rest else least} for each replica"


def _share(split: float | None) -> str | None:
    return f"the last {split:.3g} of the rows" if split else None


def _checkpoint(callback: keras.callbacks.Callback) -> str | None:
    """Return where a callback saves, and how often; None for those that save no model.

    >>> from types import SimpleNamespace
    >>> _checkpoint(SimpleNamespace(backup_dir="backup", save_freq=100))
    'SimpleNamespace: backup, every 100 batches'
    """
    place = getattr(callback, "backup_dir", None) or getattr(callback, "filepath", None)
    if place is None:
        return None
    every = getattr(callback, "save_freq", None)
    often = {"epoch": ", every epoch", "auto": ", as often as a measured share of training allows"}
    text = f", every {every} batches" if isinstance(every, int) else often.get(str(every), "")
    return f"{type(callback).__name__}: {place}{text}"
