"""Named arrays on the disk, by Orbax. The only file that imports it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from unisono._errors import CheckpointError

_FOLDER = "arrays"
_EMPTY = "empty_arrays.json"


def save_arrays(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays into a folder.

    Args:
        folder: exists.
        arrays: name to array, of any shape and dtype that JAX knows.
    """
    full = {name: np.asarray(a) for name, a in arrays.items() if np.size(a)}
    # Orbax refuses arrays without elements, and empty trees.
    empty = {name: [list(a.shape), str(a.dtype)] for name, a in arrays.items() if not np.size(a)}
    (folder / _EMPTY).write_text(json.dumps(empty))
    if full:
        _save(folder / _FOLDER, full)


def load_arrays(folder: Path) -> dict[str, np.ndarray]:
    """Read what `save_arrays` wrote.

    Args:
        folder: the same.

    Raises:
        CheckpointError: Orbax cannot read it.
    """
    found = {
        name: np.zeros(shape, dtype)
        for name, (shape, dtype) in json.loads((folder / _EMPTY).read_text()).items()
    }
    if not (folder / _FOLDER).exists():
        return found
    with _orbax() as orbax:
        try:
            loaded = orbax.load(folder / _FOLDER)
        except Exception as error:  # Orbax and TensorStore raise many kinds.
            raise CheckpointError(
                f"The arrays of a checkpoint must be readable. Received: {error} at {folder}. "
                "Restore an earlier one."
            ) from error
    return found | {name: np.asarray(value) for name, value in loaded.items()}


def _save(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    import jax

    if jax.process_count() == 1:
        with _orbax() as orbax:
            orbax.save(folder, arrays)
        return
    # In a cluster, `v1.save` compares the folder between all processes of JAX, also those that it was
    # told do not take part. The older interface does not, and `v1.load` reads what it writes.
    from orbax import checkpoint

    own = jax.process_index()
    alone = checkpoint.options.MultiprocessingOptions(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"unisono{own}"
    )
    handler = checkpoint.PyTreeCheckpointHandler(multiprocessing_options=alone)
    with checkpoint.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        checkpointer.save(folder, args=checkpoint.args.PyTreeSave(dict(arrays)))


@contextlib.contextmanager
def _orbax() -> Iterator[Any]:
    """Orbax's version 1 in a context in which only this process writes."""
    import jax
    from orbax.checkpoint import v1

    own = jax.process_index()
    context = v1.Context()
    # Orbax waits at a barrier for all processes of JAX unless told which take part.
    context.multiprocessing.primary_host = own
    context.multiprocessing.active_processes = {own}
    context.multiprocessing.barrier_sync_key_prefix = f"unisono{own}"
    with context:
        yield v1
