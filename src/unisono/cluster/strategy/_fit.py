"""What surrounds `fit`, `evaluate` and `predict` where several workers train together.

All workers compare the call, take over the chief's random state and share its decisions; the chief
prints and writes for all.

Tests: tests/cluster/test_chief.py, tests/cluster/test_early.py, tests/cluster/test_peers.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence

import keras
import numpy as np

from unisono._system._task_reports import process_events
from unisono._types import UserValue
from unisono.checkpoint._json_state import Array, decode, encode
from unisono.checkpoint._rng_state import RandomState
from unisono.checkpoint._variable_paths import canonical_paths
from unisono.cluster.strategy._call_description import (
    are_within,
    call_fingerprint,
    other_callbacks,
    size_of,
)
from unisono.cluster.strategy._chief_callbacks import (
    DECISION_HOOKS,
    SameState,
    decision_hooks,
    is_chief_only,
    may_read_weights,
    shared_decisions,
)
from unisono.collectives._process_group import ProcessGroup
from unisono.step._keras_internals import is_validation, stored_value
from unisono.step._layout import gathered_for_file
from unisono.step._value_handle import AgreedHandle
from unisono.strategies._base import Arguments
from unisono.strategies._replicated import ReplicatedStrategy
from unisono.training._fit_extension import flat_callbacks
from unisono.training.trainer._run_ahead_of_loop import can_run_ahead


class MultiWorkerFit:
    """Make calls of Keras' methods alike on all workers of a strategy."""

    def __init__(self, strategy: ReplicatedStrategy) -> None:
        self._strategy, self._group = strategy, strategy.process_group
        self._printed = ""
        #: Whether validation in `fit` may run ahead on all workers.
        self._validates_ahead = False

    @contextlib.contextmanager
    def around(
        self, model: keras.Model, arguments: Arguments, ahead: bool
    ) -> Iterator[tuple[Arguments, bool]]:
        """Surround `fit`; see `Strategy._around_fit`.

        Raises:
            ClusterError: on all workers, when their calls differ.
        """
        callbacks = flat_callbacks(arguments["callbacks"])
        hooks = decision_hooks(callbacks)
        # Weights in parts may be too large for a host, which no program must gather for nothing.
        reads = self._strategy.state_layout.keeps_weights or any(map(may_read_weights, callbacks))
        random = _EncodedRandomState()
        others = json.dumps(other_callbacks(callbacks)).encode()
        validates_ahead = self._strategy._runs_ahead and can_run_ahead(model, callbacks, "evaluate")
        own = _Message(
            bytes([ahead, validates_ahead, *(hook in hooks for hook in DECISION_HOOKS), reads]),
            hashlib.sha256(others).digest(),
            random.digest(),
        )
        self._group.note_call("fit")
        # What may differ travels in the message that compares the call.
        every = _Message.read(
            self._group.require_same(call_fingerprint(model, arguments), "A call of `fit`", own.to_bytes())
        )
        self._strategy._replicas.begin_again("TRAIN")
        # Names and the state of generators are sent only where their digests differ.
        if any(answer.callbacks != every[0].callbacks for answer in every):
            self._compare_callbacks(others)
        if any(answer.random != every[0].random for answer in every):
            random.take_over(self._group)
        changed = dict(arguments)
        self._print_summary(arguments, callbacks)
        if not self._group.is_chief:
            changed["verbose"] = 0
            callbacks = _of_all(callbacks)
        hooks = {h for i, h in enumerate(DECISION_HOOKS, start=2) if any(a.flags[i] for a in every)}
        # First, before a callback saves what has drifted apart; last, when all have decided.
        compare = functools.partial(self._compare_state, gathers=any(a.flags[-1] for a in every))
        callbacks = [SameState(compare), *callbacks]
        changed["callbacks"] = [*callbacks, shared_decisions(self._group.broadcast, callbacks, hooks)]
        outer, self._validates_ahead = self._validates_ahead, all(answer.flags[1] for answer in every)
        try:
            yield changed, all(answer.flags[0] for answer in every)
        finally:
            self._validates_ahead = outer

    def prepare(
        self, model: keras.Model, name: str, arguments: Arguments, ahead: bool
    ) -> tuple[Arguments, bool]:
        """Return the arguments of `evaluate` or `predict` for this process, and whether all may run ahead.

        Raises:
            ClusterError: on all workers, when a size or a shape differs between them.
        """
        validates = is_validation(arguments)
        if validates:
            # In `fit`, Keras evaluates with arguments that were compared when it began.
            ahead = self._validates_ahead
        else:
            self._group.note_call(name)
            fingerprint = {"method": name, **call_fingerprint(model, arguments)}
            every = self._group.require_same(fingerprint, f"A call of `{name}`", bytes([ahead]))
            ahead = all(answer[0] for answer in every)
        if not self._group.is_chief:
            arguments = {**arguments, "verbose": 0}
            # Those of `fit` are chosen already, and a list of them would get the `params` of `evaluate`.
            if "callbacks" in arguments and not validates:
                arguments["callbacks"] = _of_all(flat_callbacks(arguments["callbacks"]))
        return arguments, ahead

    def _compare_state(self, variables: Sequence[keras.Variable], gathers: bool) -> None:
        """Raise on all workers where the values of variables differ between them.

        Args:
            gathers: whether callbacks, such as `ModelCheckpoint` on one worker alone, read them after this.
        """
        # What a layout adds is in no file that callbacks write.
        if gathers:
            self._strategy._gather_state(gathered_for_file(variables))
        variables = [v for v in variables if not isinstance(stored_value(v), AgreedHandle)]
        paths = canonical_paths(v.path for v in variables)
        values = [stored_value(v) for v in variables]
        self._group.compare_state(self._strategy.mesh, paths, values)

    def _compare_callbacks(self, own: bytes) -> None:
        """Reject callbacks that other workers have and the chief has not; it may print or measure alone."""
        if not are_within([json.loads(data) for data in self._group.gather(own)]):
            self._group.require_same({"callbacks": "\n".join(json.loads(own))}, "A call of `fit`")

    def _print_summary(self, arguments: Arguments, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Print on the chief what begins, unless `fit` is silent or the same was printed before."""
        if not self._group.is_chief or not arguments.get("verbose", "auto"):
            return
        data = {k: size_of(arguments[k]) for k in ("x", "validation_data") if arguments.get(k) is not None}
        mesh = self._strategy.mesh
        counts = mesh.num_replicas, self._group.size, len(mesh.devices) // self._group.size
        text = run_summary(arguments, callbacks, data, mesh.platform, *counts)
        # Not by each generation of a launch.
        if text != self._printed and process_events().is_new(text):
            # Not to stdout, which may be what the program computes.
            print(text, file=sys.stderr, flush=True)
        self._printed = text


@dataclasses.dataclass(frozen=True)
class _Message:
    """What a worker sends beside the facts of its call, as bytes of fixed sizes.

    Args:
        flags: whether steps may run ahead, whether those of validation may, for each of `DECISION_HOOKS`
            whether a callback has it, and whether one may read weights.
        callbacks: digest of those callbacks that all workers should have.
    """

    flags: bytes
    callbacks: bytes
    random: bytes

    def to_bytes(self) -> bytes:
        return self.flags + self.callbacks + self.random

    @classmethod
    def read(cls, every: Sequence[bytes]) -> list[_Message]:
        """Return the messages of all workers from their bytes."""
        flags = len(DECISION_HOOKS) + 3
        ends = flags, flags + hashlib.sha256().digest_size
        return [cls(data[: ends[0]], data[ends[0] : ends[1]], data[ends[1] :]) for data in every]


class _EncodedRandomState:
    """The random state of this process, encoded to be compared and sent."""

    def __init__(self) -> None:
        self._arrays: dict[str, Array] = {}
        self._random_state = json.dumps(encode(RandomState().get_state(), self._arrays, "random")).encode()

    def digest(self) -> bytes:
        """Return 32 bytes that are equal for equal states."""
        state = hashlib.sha256(self._random_state)
        for name in sorted(self._arrays):
            state.update(np.ascontiguousarray(self._arrays[name]).tobytes())
        return state.digest()

    def take_over(self, group: ProcessGroup) -> None:
        """Continue from the first worker's state."""
        fingerprint = json.loads(group.broadcast(self._random_state))
        names = sorted(self._arrays)
        values = group.broadcast_arrays([self._arrays[n] for n in names])
        RandomState().set_state(decode(fingerprint, dict(zip(names, values, strict=True))))


def _of_all(callbacks: list[keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
    """Return the callbacks that act on workers other than the chief, too."""
    return [c for c in callbacks if not is_chief_only(c)]


# --- what the chief prints ----------------------------------------------------------------------------


def run_summary(
    arguments: Mapping[str, UserValue],
    callbacks: Sequence[keras.callbacks.Callback],
    data: Mapping[str, str],
    platform: str,
    replicas: int,
    workers: int,
    devices: int,
) -> str:
    """Return a block of lines about a call of `fit`.

    Args:
        devices: of a worker.

    >>> data = {"x": "ndarray (1797, 64)", "validation_data": "tuple (99, 64) (99,)"}
    >>> print(run_summary({"batch_size": 50, "epochs": 3}, [], data, "cpu", 3, 3, 1))
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
    lines = [
        f"unisono: fit on {replicas} replica{'s' * (replicas > 1)}: {workers} workers, "
        f"each with {devices} {platform} device{'s' * (devices > 1)}"
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
