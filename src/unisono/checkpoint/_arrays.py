"""Named arrays on the disk, by Orbax, or in one file. The only file that imports Orbax.

Tests: tests/unit/checkpoint/test_arrays.py, tests/virtual/checkpoint/test_checkpoint.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from unisono._checks import whole_numbers
from unisono._errors import CheckpointError
from unisono._system._json import parse_json
from unisono.checkpoint import _safetensors
from unisono.checkpoint._json_state import Array, HostArray
from unisono.checkpoint._unread_arrays import unreadable
from unisono.step._value_handle import ValueHandle

_LOG = logging.getLogger("unisono")

_FOLDER = "arrays"
_FILE = "arrays.safetensors"
_EMPTY = "empty_arrays.json"

#: Paths that Orbax and TensorStore use as they are. Orbax passes others to `glob` without escaping
#: `[`, `*` and `?`, and TensorStore needs UTF-8.
_PLAIN = re.compile(r"[\w\-./=,+@ ]*", re.ASCII)
#: OCDBT's root file; each process first writes a store of its own below it.
_ROOT, _STORES = "manifest.ocdbt", "ocdbt.process_*"


def save_arrays(
    folder: Path, arrays: Mapping[str, HostArray], *, in_one_file: bool = False, file: Path | None = None
) -> None:
    """Write arrays into a folder.

    Args:
        in_one_file: whether to write without Orbax what the format of such a file can hold, which is much
            faster.
        file: what `stage_arrays` wrote of further arrays, on the same file system; it is moved.
    """
    full = {name: np.asarray(a) for name, a in arrays.items() if a.nbytes}
    if file is not None:
        file.replace(folder / _FILE)
    elif in_one_file:
        held = {name: a for name, a in full.items() if _safetensors.can_hold(name, a)}
        _safetensors.save(folder / _FILE, held)
        full = {name: a for name, a in full.items() if name not in held}
    # Orbax refuses arrays without elements, and empty trees.
    empty = {name: [list(a.shape), str(a.dtype)] for name, a in arrays.items() if not a.nbytes}
    (folder / _EMPTY).write_text(json.dumps(empty))
    if full:
        with _plain_path(folder) as plain, _quiet():
            _save_with_retry(plain / _FOLDER, full)


def stage_arrays(
    folder: Path, arrays: Mapping[str, Array], note: Callable[[memoryview], object] | None
) -> tuple[Path, dict[str, np.ndarray]]:
    """Write arrays one after the other, each when it is its turn to be read; return the rest of them, read.

    Args:
        folder: is made.
        note: called with all that is written.

    Returns:
        The file, for `save_arrays`, and what it cannot hold.
    """
    held = {name: a for name, a in arrays.items() if _is_staged(name, a)}
    rest = {name: np.asarray(a) for name, a in arrays.items() if name not in held}
    _safetensors.save(folder / _FILE, held, note)
    return folder / _FILE, rest


def read_along(arrays: Mapping[str, ValueHandle]) -> None:
    """Read what lies in parts on all workers, on those that do not write, in the order of `stage_arrays`."""
    for _, array in sorted(arrays.items(), key=lambda item: _is_staged(*item)):
        array.whole()


def _is_staged(name: str, array: Array) -> bool:
    return array.nbytes > 0 and _safetensors.can_hold(name, array)


def digest_of(folder: Path) -> str:
    """Return the digest of the file that `stage_arrays` wrote."""
    with (folder / _FILE).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_arrays(folder: Path) -> dict[str, HostArray]:
    """Read what `save_arrays` wrote; large arrays are read where they are needed."""
    arrays: dict[str, HostArray] = _empty_arrays(folder / _EMPTY)
    if (folder / _FILE).exists():
        arrays |= _safetensors.load(folder / _FILE)
    if not (folder / _FOLDER).exists():
        return arrays
    with _plain_path(folder) as plain, _quiet(), _orbax() as orbax, _joined(plain) as readable:
        try:
            loaded = orbax.load(readable / _FOLDER)
            return arrays | {name: np.asarray(value) for name, value in loaded.items()}
        except Exception as error:  # Orbax and TensorStore raise many kinds.
            raise unreadable(f"{error} at {folder}") from error


def _empty_arrays(path: Path) -> dict[str, HostArray]:
    """Return the arrays without elements, of which a file has the shapes and types."""
    try:
        specs = {
            name: (whole_numbers(shape, 0), jnp.dtype(dtype))
            for name, (shape, dtype) in parse_json(path.read_bytes()).items()
        }
        wrong = next(
            (n for n, (shape, t) in specs.items() if shape is None or (t.itemsize and 0 not in shape)), None
        )
        if wrong is not None:
            raise ValueError(f"{wrong[:100]!r} has no shape without elements")
        return {name: np.zeros(shape or (), dtype) for name, (shape, dtype) in specs.items()}
    except (OSError, ValueError, TypeError, AttributeError, SyntaxError) as error:
        raise unreadable(f"{error} at {path}") from error


@contextlib.contextmanager
def _plain_path(folder: Path) -> Iterator[Path]:
    """A path to `folder` that Orbax and TensorStore can use: through a link where its own is not one."""
    if _PLAIN.fullmatch(str(folder)):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="unisono-", dir=_plain_temporary_directory()) as aside:
        link = Path(aside) / "checkpoint"
        link.symlink_to(folder, target_is_directory=True)
        yield link


def _plain_temporary_directory() -> str:
    candidates = (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm")
    folder_of_arrays = next((c for c in candidates if _PLAIN.fullmatch(c) and Path(c).is_dir()), None)
    if folder_of_arrays is None:
        raise CheckpointError(
            "A checkpoint below a path with other characters than letters, digits and -./=,+@ needs a "
            "directory for temporary files without them. "
            f"Received: {candidates[0]!r}. Set TMPDIR to such a directory."
        )
    return folder_of_arrays


@contextlib.contextmanager
def _joined(folder: Path) -> Iterator[Path]:
    """A folder whose store has a root file.

    Earlier versions saved below paths with `[`, `*` or `?` without one: Orbax did not find the process' own
    store, which holds everything.
    """
    state = folder / _FOLDER / "state"
    stores = [p for p in state.iterdir() if p.match(_STORES)] if state.is_dir() else []
    if len(stores) != 1 or (state / _ROOT).exists():
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="unisono-", dir=_plain_temporary_directory()) as aside:
        _link_all(folder / _FOLDER, Path(aside) / _FOLDER, but="state")
        _link_all(state, Path(aside) / _FOLDER / "state")
        _link_all(stores[0], Path(aside) / _FOLDER / "state")
        yield Path(aside)


def _link_all(source: Path, target: Path, but: str = "") -> None:
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.name != but and not (target / path.name).is_symlink():
            (target / path.name).symlink_to(path.absolute())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop Orbax's INFO messages, unless the user wants DEBUG: 35 for a save and a load (2026-11-22).

    Its errors and warnings, other messages of absl's log, and an Orbax that the user calls stay as they are.
    """
    log = logging.getLogger("absl")
    if log.isEnabledFor(logging.DEBUG) or logging.getLogger("unisono").isEnabledFor(logging.DEBUG):
        yield
        return

    def is_shown(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or "orbax" not in Path(record.pathname).parts

    log.addFilter(is_shown)
    try:
        yield
    finally:
        log.removeFilter(is_shown)


def _save_with_retry(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Save once more where TensorStore does not find a file that it has just written, or a clock jumps.

    With version 0.1.86 one of 12 short trainings on a busy machine ended so (2026-11-22). Orbax takes a wall
    clock for its limits: where that jumps by a day, all of them are over at once.
    """
    try:
        _save(folder, arrays)
    except (ValueError, TimeoutError) as error:
        if isinstance(error, ValueError) and "NOT_FOUND" not in str(error):
            raise
        _LOG.warning("The arrays of a checkpoint are written once more, as Orbax failed: %s", error)
        # Orbax's folder may still have the name under which it is written.
        for path in folder.parent.glob(f"{_FOLDER}*"):
            if path.is_dir():
                shutil.rmtree(path)
        _save(folder, arrays)


def _save(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    import jax

    if jax.process_count() == 1:
        with _orbax() as orbax:
            orbax.save(folder, arrays)
        return
    # In a cluster, `v1.save` compares the folder between all processes of JAX, also those outside of its
    # `active_processes`. The older interface does not, and `v1.load` reads what it writes.
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
    # By default Orbax waits at a barrier for all processes of JAX.
    context.multiprocessing.primary_host = own
    context.multiprocessing.active_processes = {own}
    context.multiprocessing.barrier_sync_key_prefix = f"unisono{own}"
    with context:
        yield v1
