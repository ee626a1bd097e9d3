"""Whether the steps of a call of `fit`, `evaluate` or `predict` may run ahead of Keras' loop.

They may where no callback can see single batches. Callbacks that promise to be `async_safe` may: Keras
calls them in another thread, beside the next steps, so that they can read the logs alone.

Tests: tests/virtual/training/test_lookahead.py, tests/virtual/training/test_evaluate_ahead.py,
tests/virtual/training/test_speculation.py, tests/virtual/callbacks/test_resume.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

import jax
import keras
import numpy as np

from unisono._system._blocks import set_for_block
from unisono._types import KerasWrap, Logs
from unisono.training._fit_extension import FitExtension, flat_callbacks, overrides
from unisono.training.groups._lookahead import StepLookahead
from unisono.training.trainer._protocol import (
    lookahead_of,
    plain_function_of,
    set_lookahead,
    set_usual_rows,
    usual_rows_of,
)
from unisono.training.trainer._trainer_step import TASKS

if TYPE_CHECKING:
    from unisono.strategies._base import Strategy


class _BatchHooks(NamedTuple):
    """The methods of a callback that see single batches, before and after the step.

    Args:
        before: names of methods.
        begin: the method of `CallbackList` before the first batch, when Keras has made the step's function.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    begin: str


_HOOKS = {
    "fit": _BatchHooks(
        ("on_batch_begin", "on_train_batch_begin"),
        ("on_batch_end", "on_train_batch_end"),
        "on_train_begin",
    ),
    "evaluate": _BatchHooks(("on_test_batch_begin",), ("on_test_batch_end",), "on_test_begin"),
    "predict": _BatchHooks(("on_predict_batch_begin",), ("on_predict_batch_end",), "on_predict_begin"),
}


def wraps() -> list[KerasWrap]:
    """Return what is wrapped of callbacks.

    Ends of batches are skipped where no callback has a hook of batches, because Keras would wait for the logs
    of the step there. `ProgbarLogger` shows batches in their order.
    """
    own = keras.callbacks
    return [
        *((own.CallbackList, hooks.after[-1], _batch_end_of(name)) for name, hooks in _HOOKS.items()),
        *((own.ProgbarLogger, hooks.after[-1], _show_in_order) for hooks in _HOOKS.values()),
        *((own.CallbackList, _HOOKS[name].begin, _begin_of(name)) for name in ("evaluate", "predict")),
    ]


class _EpochMarks(keras.callbacks.Callback):
    """Gives the train function its lookahead, and the lookahead the length of each epoch.

    Args:
        ends_data: whether an epoch is as long as the data, not as long as an argument says.
    """

    def __init__(self, lookahead: StepLookahead, ends_data: bool) -> None:
        super().__init__()
        self.lookahead, self._ends_data = lookahead, ends_data

    def on_train_begin(self, logs: Logs = None) -> None:
        # Keras makes the train function within `fit`, before this hook.
        set_lookahead(self.model.train_function, self.lookahead)
        steps = self.params["steps"]
        self.lookahead.planned = steps and steps * self.params["epochs"]

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self.lookahead.begin_epoch(self.params["steps"], self._ends_data)


def _sees_batches(callback: keras.callbacks.Callback, name: str) -> bool:
    """Return whether a callback does anything at single batches that must happen between two steps."""
    before, after, _ = _HOOKS[name]
    if name != "fit":
        # Keras' own bar prints the logs, and no predictions.
        if isinstance(callback, keras.callbacks.ProgbarLogger):
            return False
    elif isinstance(callback, keras.callbacks.ModelCheckpoint):
        return bool(callback.save_freq != "epoch")
    elif hasattr(callback, "_sees_batches"):
        return bool(callback._sees_batches)
    is_safe = name != "predict" and getattr(callback, "async_safe", False)
    return overrides(callback, *before) or (not is_safe and overrides(callback, *after))


def _has_compiled_steps(model: keras.Model, callbacks: object, name: str) -> bool:
    """Return whether a call runs compiled steps, and all of its callbacks are known."""
    if model.run_eagerly or not model.jit_compile:
        return False
    if any(getattr(jax.config, option) for option in ("jax_debug_nans", "jax_debug_infs")):
        return False
    # A user's `CallbackList` cannot be extended by `_EpochMarks`, and may hide hooks of batches. In `fit`,
    # Keras evaluates with its own.
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return name != "fit" and type(callbacks) is keras.callbacks.CallbackList
    return True


def can_run_ahead(model: keras.Model, callbacks: object, name: str = "fit") -> bool:
    """Return whether no callback can observe how many steps are done between two batches.

    Args:
        name: `"fit"`, `"evaluate"` or `"predict"`.
    """
    if not _has_compiled_steps(model, callbacks, name):
        return False
    listed = flat_callbacks(callbacks)
    # Those that follow each batch count calls of the function.
    if model.steps_per_execution > 1 and any(isinstance(c, FitExtension) for c in listed):
        return False
    return not any(_sees_batches(c, name) for c in listed)


def can_speculate(
    model: keras.Model, callbacks: object, data: Mapping[str, object], name: str = "fit"
) -> bool:
    """Return whether steps may run ahead of callbacks which see single batches; see `Speculation`.

    Args:
        model: bound to a strategy of one process.
        data: the method's arguments by name. A generator may depend on what a callback does: then nothing
            runs ahead.
    """
    if name == "predict" or not _has_compiled_steps(model, callbacks, name):
        return False
    if name == "fit" and any(_needs_each_state(c) for c in flat_callbacks(callbacks)):
        return False
    leaves = jax.tree.leaves([data.get(key) for key in ("x", "y", "sample_weight")])
    # A callback that writes into the arrays themselves is not noticed: batches are taken some steps ahead.
    return bool(leaves) and all(isinstance(x, (np.ndarray, jax.Array)) for x in leaves)


def _needs_each_state(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback is known to use the state between batches, or to wrap the step's function."""
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        return bool(callback.save_freq != "epoch")
    return isinstance(callback, FitExtension) or bool(getattr(callback, "_sees_batches", False))


@contextlib.contextmanager
def with_lookahead(
    model: keras.Model, arguments: dict[str, object], lookahead: StepLookahead | None
) -> Iterator[dict[str, object]]:
    """Let the train function run ahead during a call of `fit`.

    Args:
        lookahead: for the function, if `can_run_ahead` on all workers or `can_speculate`; else None.
    """
    callbacks = arguments.get("callbacks")
    try:
        if lookahead is None:
            yield arguments
        else:
            limit = arguments.get("steps_per_epoch") or keras.config.max_steps_per_epoch()
            yield {**arguments, "callbacks": [*flat_callbacks(callbacks), _EpochMarks(lookahead, not limit)]}
    finally:
        set_lookahead(model.train_function, None)
        if lookahead is not None:
            lookahead.begin_epoch(None)


def lookahead_for(
    strategy: Strategy,
    model: keras.Model,
    arguments: Mapping[str, object],
    name: str,
    is_free: bool,
) -> StepLookahead | None:
    """Return what a call runs ahead with; None where its steps run one by one."""
    if is_free:
        return StepLookahead(model.steps_per_execution, name == "predict")
    replicated = strategy._replicated
    # Of several workers, one may use the state alone: no program that all run can then be repeated.
    if not strategy._runs_ahead or replicated is None or replicated.process_group.size > 1:
        return None
    can_repeat = name != "fit" or replicated.state_layout.can_repeat
    guesses = can_repeat and can_speculate(model, arguments.get("callbacks"), arguments, name)
    if not guesses:
        return None
    from unisono.training.trainer._speculation import Speculation

    return Speculation(model.steps_per_execution)


# --- evaluate and predict -------------------------------------------------------------------


@dataclasses.dataclass
class _CallAhead:
    """A call of `evaluate` or `predict` whose steps may run ahead, until its loop begins.

    Args:
        is_begun: whether the function has the lookahead: a callback may evaluate while an evaluation runs.
    """

    model: keras.Model
    name: str
    lookahead: StepLookahead
    is_begun: bool = False


_CALL: ContextVar[_CallAhead | None] = ContextVar("call", default=None)


@contextlib.contextmanager
def running_ahead(
    model: keras.Model, name: str, steps: int | None, lookahead: StepLookahead | None
) -> Iterator[None]:
    """Let the test or the predict function run ahead during a call of `evaluate` or `predict`.

    Args:
        steps: the method's argument: after how many batches it ends, or None for all data.
    """
    if lookahead is None:
        yield
        return
    call = _CallAhead(model, name, lookahead)
    limits = [n for n in (steps, keras.config.max_steps_per_epoch()) if n]
    call.lookahead.begin_epoch(min(limits, default=None))
    try:
        with set_for_block(_CALL, call):
            yield
    finally:
        set_lookahead(getattr(model, TASKS[name].function), None)


def _begin_of(name: str) -> Callable[..., None]:
    """Return what takes the place of the method of `CallbackList` that begins `evaluate` or `predict`."""

    def begin(original: Callable[..., None], self: keras.callbacks.CallbackList, logs: Logs = None) -> None:
        call = _CALL.get()
        # Keras has made the function just before.
        if call is not None and call.name == name and not call.is_begun:
            call.is_begun = True
            set_lookahead(getattr(call.model, TASKS[name].function), call.lookahead)
        original(self, logs)

    return begin


# --- ends of batches --------------------------------------------------------------------------


def _batch_end_of(name: str) -> Callable[..., None]:
    """Return what takes the place of the method of `CallbackList` for the end of a batch.

    Keras' own method starts a thread that waits for the step and reads its logs, also for no hook at all.
    """
    hooks, calls = _HOOKS[name].after, f"_unisono_calls_{name}"

    def batch_end(
        original: Callable[..., None], self: keras.callbacks.CallbackList, batch: int, logs: Logs = None
    ) -> None:
        known = vars(self)
        # Decided once for an epoch, as each step of a small model takes less time than this.
        if batch == 0 or calls not in known:
            _note_first_program(self, name)
            is_ahead = _lookahead_of_call(self, name) is not None
            known[calls] = not is_ahead or any(overrides(c, *hooks) for c in self.callbacks)
        if known[calls]:
            original(self, batch, logs)

    return batch_end


#: Held while a progress bar is updated.
_BAR = threading.Lock()
#: The bars of epochs whose first program had several steps.
_TOGETHER: weakref.WeakSet[keras.callbacks.ProgbarLogger] = weakref.WeakSet()


def _note_first_program(callbacks: keras.callbacks.CallbackList, name: str) -> None:
    ahead = _lookahead_of_call(callbacks, name)
    bars = {c for c in callbacks.callbacks if isinstance(c, keras.callbacks.ProgbarLogger)}
    if ahead is None or not ahead.num_queued:
        _TOGETHER.difference_update(bars)
    else:
        _TOGETHER.update(bars)


def _show_in_order(
    original: Callable[..., None], self: keras.callbacks.ProgbarLogger, batch: int, logs: Logs = None
) -> None:
    """Show the end of a batch, unless a later one is shown.

    Keras reads the logs of batches in several threads. Those of steps that ran in one program are there at
    the same moment, and a later batch may reach the bar first: then an earlier one is no longer shown.

    The bar shows the time since the end of the first step, divided by the steps after it. Where the first
    program had several steps, their logs are there at once, and they would count as steps that took no time:
    then the first step is not shown, and the bar divides the time since the beginning of the epoch.
    """
    with _BAR:
        if batch >= self.seen and (batch > 0 or self not in _TOGETHER):
            original(self, batch, logs)


def _lookahead_of_call(callbacks: keras.callbacks.CallbackList, name: str) -> StepLookahead | None:
    """Return what a call runs ahead with; not by its model, which Keras fills with the state when asked."""
    if name == "fit":
        marks = (c for c in callbacks.callbacks if isinstance(c, _EpochMarks))
        return next((mark.lookahead for mark in marks), None)
    call = _CALL.get()
    return call.lookahead if call is not None and call.name == name and call.is_begun else None


# --- calls within calls -------------------------------------------------------------------------


@contextlib.contextmanager
def apart_from_outer_call(model: keras.Model, name: str) -> Iterator[None]:
    """Keep a call apart from one that is running, from whose callback it comes: both use one function.

    The inner call must not get steps that were run ahead for the outer one, nor count as its batches in a
    backup, nor change which batch size is usual there. The first batch of a loop says which size is usual.
    """
    attribute = TASKS[name].function
    outer = getattr(model, attribute)
    function = plain_function_of(outer)
    if function is not outer:
        setattr(model, attribute, function)
    rows, ahead = usual_rows_of(function), lookahead_of(function)
    set_lookahead(function, None)
    if not name.endswith("_on_batch"):
        set_usual_rows(function, None)
    try:
        yield
    finally:
        if ahead is not None and ahead.is_guess:
            ahead.continue_from(is_unchanged=False)
        set_lookahead(function, ahead)
        set_usual_rows(function, rows)
        if function is not outer and getattr(model, attribute) is function:
            setattr(model, attribute, outer)
