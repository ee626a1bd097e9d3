"""Restoring a checkpoint into objects, also into variables that do not exist yet.

As in TensorFlow: what a checkpoint holds for a model that is not built, for an optimizer without its slots
or for an attribute that is not set waits until they are created. What exists is restored at once.

Source: https://www.tensorflow.org/guide/checkpoint#delayed_restorations

Tests: tests/virtual/checkpoint/test_deferred.py.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import keras

from unisono._errors import CheckpointUnmatchedError
from unisono.checkpoint._contents import (
    OPTIMIZER,
    WEIGHTS,
    Parts,
    names_in,
    plain_values,
    problems_of,
    require_no,
    wanted_names,
)
from unisono.checkpoint._snapshot import Snapshot
from unisono.checkpoint._tracking import Holder
from unisono.training._step_form import has_stateful_step, when_built_by_step

_LOG = logging.getLogger("unisono")


class PendingValues:
    """The values of a checkpoint that wait for objects which do not exist yet."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.names: set[str] = set()
        self.restored: set[str] = set()
        self.is_partial = False

    def report(self) -> None:
        """Log what was never used."""
        if self.names and not self.is_partial:
            _LOG.warning(
                "Values of the checkpoint %s were never used: %s. Create the objects that they belong to, or "
                "say `restore(path).expect_partial()`.",
                self.path, _listed(self.names),
            )  # fmt: skip


def _listed(names: set[str]) -> str:
    first = sorted(names)[:5]
    return ", ".join(first) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


class Restoration:
    """One call of `restore`, which lasts until all values are used."""

    def __init__(self, holder: Holder, snapshot: Snapshot, parts: Sequence[str] | None, path: str) -> None:
        self._holder, self._snapshot, self._wanted = holder, snapshot, parts
        self._arrays: Mapping[str, Any] = snapshot.on_host()
        #: Prefixes of the objects that had no variables yet.
        self._unbuilt: set[str] = set()
        self._uncompiled: set[str] = set()
        self.waiting = PendingValues(path)

    def begin(self) -> dict[str, Any]:
        """Restore what exists, all of it or nothing, and let the rest wait.

        Raises:
            CheckpointMismatchError: an object is another one than was saved.
        """
        parts = Parts(self._holder.objects, deferred=True)
        ours = wanted_names((*parts.variables, *parts.stateful), self._wanted)
        theirs = wanted_names(names_in(self._snapshot, self._arrays), self._wanted)
        later = {name for name in theirs - ours if _may_come(name, parts)}
        if problems_of(parts, self._arrays, ours, theirs - later):
            # All differences: a value that waits may be one of those that are missing, by another name.
            require_no(problems_of(parts, self._arrays, ours, theirs))
        parts.put(self._snapshot, self._arrays, ours)
        self.waiting.restored |= ours
        self.waiting.names |= later
        values = plain_values(self._snapshot, self._arrays, self._wanted)
        # `waiting` does not refer to this object, which the finalizer would otherwise keep alive.
        weakref.finalize(self, self.waiting.report)
        self._follow(parts)
        return values

    def cancel(self) -> None:
        """Restore nothing more: another checkpoint was."""
        self.waiting.names.clear()
        self._unbuilt.clear()

    def unmatched(self) -> set[str]:
        """Names of the variables and states that exist and were not restored."""
        # To look must not change anything: no slots are built.
        parts = Parts(self._holder.objects, deferred=True, builds=False)
        return wanted_names((*parts.variables, *parts.stateful), self._wanted) - self.waiting.restored

    def advance(self) -> None:
        """Restore what has been created since.

        Raises:
            CheckpointMismatchError: an object was created otherwise than it was when it was saved.
        """
        if not self.waiting.names and not self._unbuilt:
            return
        # This runs inside the user's `build`, `compile` or assignment: building slots would be a side effect.
        parts = Parts(self._holder.objects, deferred=True, builds=False)
        ours = wanted_names((*parts.variables, *parts.stateful), self._wanted)
        new = self.waiting.names & ours
        problems = problems_of(parts, self._arrays, new, new)
        for unit in parts.units:
            if unit.is_built and unit.prefix in self._unbuilt:
                self._unbuilt.discard(unit.prefix)
                own = {n for n in ours if unit.holds(n)}
                theirs = {n for n in self.waiting.names | self.waiting.restored if unit.holds(n)}
                problems += problems_of(parts, {}, own - theirs, theirs - own)
                # What is wrong is said once.
                self.waiting.names -= theirs
        require_no(problems)
        parts.put(self._snapshot, self._arrays, new)
        self.waiting.restored |= new
        self.waiting.names -= new
        self._follow(parts)

    def _follow(self, parts: Parts) -> None:
        """Restore what is created from now on."""
        for unit in parts.units:
            if not unit.is_built and unit.prefix not in self._unbuilt:
                self._unbuilt.add(unit.prefix)
                _after(unit.owner, "build", self.advance)
                if isinstance(unit.owner, keras.Model) and has_stateful_step(unit.owner):
                    when_built_by_step(unit.owner, self.advance)
            optimizer = unit.prefix.removesuffix(WEIGHTS) + OPTIMIZER
            waits = any(n.startswith(f"{optimizer}/") for n in self.waiting.names)
            has_one = any(u.prefix == optimizer for u in parts.units)
            if waits and not has_one and optimizer not in self._uncompiled:
                self._uncompiled.add(optimizer)
                _after(unit.owner, "compile", self.advance)
        if self.waiting.names:
            for growing in (self._holder, *parts.growing):
                growing.watch(self.advance)
        elif not self._unbuilt:
            # All is used: free the copy of the checkpoint.
            self._arrays = {}


def _may_come(name: str, ours: Parts) -> bool:
    """Return whether a value of a checkpoint may belong to an object that is still to be created."""
    for unit in ours.units:
        # Also the optimizer of a model, which `compile` makes.
        prefix = unit.prefix.removesuffix(WEIGHTS)
        if unit.holds(name) or name.startswith(f"{prefix}/"):
            return not next((u for u in ours.units if u.holds(name)), unit).is_built
    parts = name.split("/")
    leaves = {*ours.variables, *ours.stateful, *ours.values}
    return not any("/".join(parts[: i + 1]) in leaves for i in range(len(parts)))


def _after(owner: Any, name: str, call: Callable[[], None]) -> None:
    """Call a function after the next call of an object's method."""
    before = vars(owner).get(name)
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        # Another wrapper may lie over this one by now, and must stay.
        if vars(owner).get(name) is method:
            if before is None:
                del vars(owner)[name]
            else:
                vars(owner)[name] = before
        # After the method is restored: `advance` may wrap it again.
        call()
        return result

    # On the object, where it hides the method of the class, and not by Keras' way of setting attributes.
    vars(owner)[name] = method


class RestoreStatus(dict[str, Any]):
    """The result of `restore`: plain values by name, and the values still to be restored.

    Args:
        values: plain values of the checkpoint, which cannot be changed in place, by name.
        restoration: None where there was no checkpoint.

    >>> import tempfile
    >>> import keras
    >>> from unisono.checkpoint import Checkpoint
    >>> checkpoint = Checkpoint(step=keras.Variable(7.0))
    >>> status = checkpoint.restore(checkpoint.save(tempfile.mkdtemp() + "/ckpt"))
    >>> status.assert_consumed() is status
    True
    """

    def __init__(self, values: Mapping[str, Any], restoration: Restoration | None) -> None:
        super().__init__(values)
        self._restoration = restoration

    def assert_consumed(self) -> Self:
        """Check that the checkpoint and the objects hold the same, now that all are created.

        Raises:
            CheckpointUnmatchedError: a value was not used, or an object was not in the checkpoint; it names
                every one.
        """
        waiting = self._found().waiting
        problems = [f"not used: {name}" for name in sorted(waiting.names)]
        self._require_no(problems + self._unmatched())
        return self

    def assert_existing_objects_matched(self) -> Self:
        """Check that all objects that exist now were in the checkpoint.

        Raises:
            CheckpointUnmatchedError: one was not; it names every one.
        """
        self._require_no(self._unmatched())
        return self

    def assert_nontrivial_match(self) -> Self:
        """Check that anything was restored.

        Raises:
            CheckpointUnmatchedError: nothing was.
        """
        self._require_no([] if self._found().waiting.restored else ["nothing was restored"])
        return self

    def expect_partial(self) -> Self:
        """Say that values of the checkpoint will not be used: no warning at the end."""
        if self._restoration is not None:
            self._restoration.waiting.is_partial = True
        return self

    def initialize_or_restore(self, session: Any = None) -> None:
        """Do nothing: variables are restored when `restore` is called, or when they are created."""

    run_restore_ops = initialize_or_restore

    def _found(self) -> Restoration:
        if self._restoration is None:
            raise CheckpointUnmatchedError(
                "A checkpoint must be named to be restored. Received: restore(None). Pass what `save` "
                "returned, or `manager.latest_checkpoint`, which is None where nothing was saved yet."
            )
        return self._restoration

    def _unmatched(self) -> list[str]:
        return [f"not in the checkpoint: {name}" for name in sorted(self._found().unmatched())]

    def _require_no(self, problems: Sequence[str]) -> None:
        if problems:
            raise CheckpointUnmatchedError(
                f"A checkpoint must match the objects. Received: {self._found().waiting.path} with\n  "
                + "\n  ".join(problems)
                + "\nCreate the same objects, or do not ask."
            )
