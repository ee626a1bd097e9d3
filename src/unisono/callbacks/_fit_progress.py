"""The contents of a backup of `fit` besides weights: position, metrics and logs.

Tests: tests/virtual/callbacks/test_resume.py.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import keras
import numpy as np

from unisono._checks import whole_number
from unisono._errors import CheckpointError, CheckpointMismatchError
from unisono._types import ArrayLike, PyTree, State
from unisono.checkpoint._contents import Parts
from unisono.checkpoint._json_state import decode, encode, stand_ins
from unisono.checkpoint._snapshot import Snapshot, copy_of
from unisono.step._value_handle import ValueHandle
from unisono.training.groups._multi_step import LazyArray

#: With what the names of arrays begin that replicas have of their own.
_LOCAL = "local/"


@dataclasses.dataclass
class Progress:
    """Where a run of `fit` stands.

    Args:
        epoch: the running epoch, from 0.
        batch: how many of its batches are done; 0 before its first.
        batches: how many batches were trained in all.
        stopped: whether a callback has ended training.
        first_epoch: the epoch in which the running iteration over the data began.
        used: the batches of this iteration that are done, where several epochs share it.
        epoch_random: the random state when that epoch began.
        random: the random state now.
        data: the state of the iteration over a `unisono.data.Dataset`.
        callbacks: what each callback remembers.
        data_facts: what the data looks like, to notice other data.
        first_of_run: the fingerprint of the first batch of all.
        first_of_epoch: the fingerprint of the first batch of the running epoch, or of the one just ended; of
            the running iteration, where several epochs share it.
        usual_rows: how many rows the batches have, but for a ragged last one; None where no size is usual.
        local: where replicas that train apart stand in their phase.
    """

    epoch: int = 0
    batch: int = 0
    batches: int = 0
    stopped: bool = False
    first_epoch: int = 0
    used: int = 0
    epoch_random: State = None
    random: State = None
    data: State = None
    callbacks: list[State] = dataclasses.field(default_factory=list)
    callback_names: list[str] = dataclasses.field(default_factory=list)
    data_facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    first_of_run: list[str] = dataclasses.field(default_factory=list)
    first_of_epoch: list[str] = dataclasses.field(default_factory=list)
    usual_rows: int | None = None
    local: State = None


def snapshot_of(
    model: keras.Model,
    progress: Progress,
    values: Mapping[int, jax.Array],
    logs: PyTree,
    local: Mapping[str, ArrayLike | ValueHandle],
) -> Snapshot:
    """Copy a model and where its training stands; does not wait for the devices.

    Args:
        local: what replicas that train apart have of their own, by name.
        values: `id` of a variable -> its array, where the variables are empty.
        logs: what the last batch returned to Keras' loop, inside an epoch; else None.
    """
    snapshot = Parts({"model": model}).snapshot(values)
    arrays = dict(snapshot.arrays)
    for i, variable in enumerate(model.metrics_variables):
        arrays[f"metrics/{i}"] = copy_of(values[id(variable)] if values else variable.value)
    # At the end of an epoch there is nothing to keep: the next one begins with new logs.
    if isinstance(logs, dict):
        numbers = {n: v.value if isinstance(v, LazyArray) else v for n, v in logs.items()}
        arrays |= {f"logs/{n}": copy_of(v) for n, v in numbers.items() if hasattr(v, "shape")}
    arrays |= {f"{_LOCAL}{name}": copy_of(x) for name, x in local.items()}
    # Not `asdict`, which would copy all that callbacks remember, such as the best weights.
    fields = {f.name: getattr(progress, f.name) for f in dataclasses.fields(progress)}
    facts = {**snapshot.facts, "progress": encode(fields, arrays, "progress")}
    # As text now, so that no later change of what callbacks remember gets in.
    return Snapshot(arrays, json.loads(json.dumps(facts)))


def progress_in(snapshot: Snapshot) -> Progress:
    """Return where the run stood when a backup was made.

    Raises:
        CheckpointError: it is no backup of a `fit`.
    """
    try:
        progress = Progress(**decode(snapshot.facts["progress"], snapshot.arrays))
    except (KeyError, TypeError) as error:
        raise _no_backup(f"progress that cannot be read ({type(error).__name__}: {error})") from error
    wrong = [f.name for f in dataclasses.fields(progress) if not _FITS[f.name](getattr(progress, f.name))]
    if wrong or len(progress.callbacks) != len(progress.callback_names):
        raise _no_backup(f"the fields {', '.join(wrong) or 'callbacks'} with other values than `fit` writes")
    return progress


def check_progress(snapshot: Snapshot) -> None:
    """Check that a backup says where a run stood, without reading the arrays that callbacks remember.

    Raises:
        CheckpointError: it is no backup of a `fit`.
    """
    progress_in(Snapshot(stand_ins(snapshot.arrays), snapshot.facts))


def _is_count(value: object) -> bool:
    return whole_number(value, 0) is not None


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _is_state(value: State) -> bool:
    """Return whether a value is a `RandomState`'s; None before the first."""
    return value is None or (isinstance(value, dict) and {"python", "numpy"} <= value.keys())


def _is_callback_state(value: State) -> bool:
    if not isinstance(value, dict):
        return value is None
    parts = [value.get(name, {}) for name in ("attributes", "functions", "initial")]
    return "state" in value or all(
        isinstance(part, dict) and all(isinstance(name, str) for name in part) for part in parts
    )


#: Which values a field of `Progress` may have.
_FITS: dict[str, Callable[[Any], bool]] = {
    "epoch": _is_count,
    "batch": _is_count,
    "batches": _is_count,
    "stopped": lambda value: isinstance(value, bool),
    "first_epoch": _is_count,
    "used": _is_count,
    "epoch_random": _is_state,
    "random": _is_state,
    "data": lambda value: True,
    "callbacks": lambda value: isinstance(value, list) and all(map(_is_callback_state, value)),
    "callback_names": _are_texts,
    "data_facts": lambda value: isinstance(value, dict),
    "first_of_run": _are_texts,
    "first_of_epoch": _are_texts,
    "usual_rows": lambda value: value is None or _is_count(value),
    "local": lambda value: value is None or isinstance(value, dict),
}


def _no_backup(received: str) -> CheckpointError:
    return CheckpointError(
        f"A backup must hold where a run of `fit` stood. Received: {received}. Move it away: the one before "
        "it is taken then."
    )


def restore_model(
    model: keras.Model, snapshot: Snapshot, directory: object
) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Put the weights and the optimizer of a backup into a model.

    Returns:
        The values of the metrics' variables, which Keras resets before they can be set, and the logs.
    """
    arrays = snapshot.on_host()
    names = [f"metrics/{i}" for i in range(len(model.metrics_variables))]
    metrics = {n: a for n, a in arrays.items() if n.startswith("metrics/")}
    if set(names) != set(metrics):
        raise CheckpointMismatchError(
            "The model must have the metrics that were saved. Received: "
            f"{len(names)} metric variables, in the backup {len(metrics)}. Compile with the same ones, "
            f"or delete {directory} to start from scratch."
        )
    logs = {n: a for n, a in arrays.items() if n.startswith("logs/")}
    weights = {
        n: a for n, a in arrays.items() if n not in metrics and n not in logs and not n.startswith(_LOCAL)
    }
    instead = f"delete {directory} to start from scratch, or give the callback another folder"
    Parts({"model": model}).restore(Snapshot(weights, snapshot.facts), instead=instead)
    read = {n.removeprefix("logs/"): np.asarray(a) for n, a in logs.items()}
    return [np.asarray(metrics[n]) for n in names], read


def local_phase_in(snapshot: Snapshot) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return what replicas held apart when a backup was made, as JSON and arrays; None where they did not."""
    facts = progress_in(snapshot).local
    if facts is None:
        return None
    arrays = {n.removeprefix(_LOCAL): a for n, a in snapshot.on_host().items() if n.startswith(_LOCAL)}
    return facts, arrays
