"""The interface of hooks: what they are given before and after steps, and what they may ask for.

Source: https://www.tensorflow.org/versions/r1.15/api_docs/python/tf/train/SessionRunHook

Tests: tests/unit/estimator/test_hook_runner.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np

from unisono._errors import InvalidArgumentError, UnsupportedError
from unisono._types import PyTree, UserValue
from unisono.estimator._collections import RecordedSummary, key_of

#: The key of the number of steps that have run.
GLOBAL_STEP = "global_step"


@dataclasses.dataclass(frozen=True)
class SessionRunArgs:
    """A hook's request for values of the next step.

    Args:
        fetches: names of values of the model_fn such as `"loss"`, these values themselves, variables, or
            lists and dicts of them.
        feed_dict: must be None: data come from the input_fn.
        options: accepted for TensorFlow's signature.

    >>> SessionRunArgs(["loss"]).fetches
    ['loss']
    """

    fetches: PyTree
    feed_dict: UserValue = None
    options: UserValue = None


@dataclasses.dataclass(frozen=True)
class SessionRunValues:
    """The values that a hook has asked for, after the step.

    Args:
        results: numbers and arrays of NumPy, in the structure of `SessionRunArgs.fetches`.
        options: from the arguments.
        run_metadata: None: there is no graph that was run.

    >>> SessionRunValues([0.5]).results
    [0.5]
    """

    results: PyTree
    options: UserValue = None
    run_metadata: UserValue = None


class HookSession:
    """The `session` of hooks: the values of the training, evaluation or prediction that runs.

    Args:
        exposed: what the run of the model_fn in which the hooks were made has exposed, by name.
        global_step: returns the number of steps so far.
        save: writes a checkpoint of the present step, and returns its path; its argument is whether to wait
            until it is written. None where nothing is saved.
        variable: returns the variable of a name such as `"dense/kernel"`, or None; None for no variables.
        summaries: what `unisono.estimator.summary` recorded in that run.

    >>> int(HookSession(global_step=lambda: 3).run("global_step"))
    3
    """

    def __init__(
        self,
        exposed: Mapping[str, Any] | None = None,
        global_step: Callable[[], int] = lambda: 0,
        save: Callable[[bool], str] | None = None,
        variable: Callable[[str], keras.Variable | None] | None = None,
        summaries: Sequence[RecordedSummary] = (),
    ) -> None:
        self.exposed: Mapping[str, Any] = {} if exposed is None else exposed
        self.summaries = list(summaries)
        self._global_step, self._save, self._variable = global_step, save, variable
        #: Results of the last step, by name.
        self.values: Mapping[str, Any] = {}

    @property
    def global_step(self) -> int:
        """The number of steps so far."""
        return int(self._global_step())

    def save(self, wait: bool = False) -> str:
        """Write a checkpoint of the present step.

        Args:
            wait: whether to return when it is written, and not while it is.

        Returns:
            Its path.

        Raises:
            UnsupportedError: nothing is trained.
        """
        if self._save is None:
            raise UnsupportedError(
                "A checkpoint is saved in training. Received: a call in evaluation or prediction. Give the "
                "hook to `Estimator.train`."
            )
        return self._save(wait)

    def run(self, fetches: PyTree, feed_dict: object = None) -> PyTree:
        """Return values of the last step, and of variables now.

        Args:
            fetches: as for `SessionRunArgs`.
            feed_dict: must be None.

        Raises:
            InvalidArgumentError: a fetch is no value of the model_fn.
            UnsupportedError: there is a `feed_dict`.
        """
        check_feed(feed_dict)
        return jax.tree.map(self.read, fetches, is_leaf=_is_none)

    def keys(self, fetches: PyTree) -> set[str]:
        """Return the names of the values of a step that fetches need."""
        keys = (self.key(leaf) for leaf in jax.tree.leaves(fetches))
        return {key for key in keys if key is not None}

    def key(self, leaf: object) -> str | None:
        """Return the name of one fetch; None for a variable, and for what has no value.

        Raises:
            InvalidArgumentError: the fetch is no value of the model_fn.
        """
        if isinstance(leaf, RecordedSummary):
            return leaf.key or None
        if leaf is None or isinstance(leaf, keras.Variable) or _is_operation(leaf):
            return None
        if not isinstance(leaf, str):
            key = key_of(self.exposed, leaf)
            if key is not None:
                return key
            raise InvalidArgumentError(
                "A hook asks for a value that the model_fn has exposed: its loss and predictions, a metric, "
                f"a summary, or what `tf.identity(x, name=...)` has named. Received: {leaf!r}. Name it so."
            )
        name = leaf.removesuffix(":0")
        if name in self.exposed or name in self.values:
            return name
        if name == GLOBAL_STEP or self._named_variable(name) is not None:
            return None
        known = ", ".join(repr(k) for k in [*self.exposed, GLOBAL_STEP] if not k.startswith("_"))
        raise InvalidArgumentError(
            f"A hook asks for a value of the model_fn by name. Received: {leaf!r}; there are {known}. Write "
            f"`x = tf.identity(x, name={name!r})` in the model_fn."
        )

    def read(self, leaf: Any) -> Any:
        """Return the value of one fetch, as NumPy has it."""
        if leaf is None or _is_operation(leaf):
            return None
        key = self.key(leaf)
        if key is not None:
            if key not in self.values:
                raise InvalidArgumentError(
                    f"A value of a step exists after the first step. Received: a fetch of {key!r} before it. "
                    "Ask for it in `before_run`."
                )
            value = np.asarray(self.values[key])
            return value[()] if value.ndim == 0 else value
        if isinstance(leaf, keras.Variable):
            if leaf.name == GLOBAL_STEP:
                return np.int64(self.global_step)
            return np.asarray(leaf.value)
        named = self._named_variable(leaf.removesuffix(":0"))
        return np.int64(self.global_step) if named is None else np.asarray(named.value)

    def _named_variable(self, name: str) -> keras.Variable | None:
        return None if self._variable is None else self._variable(name)


def _is_none(leaf: object) -> bool:
    return leaf is None


def _is_operation(leaf: object) -> bool:
    """Return whether a fetch is run for its effect, such as a train op."""
    return not isinstance(leaf, (str, keras.Variable, np.ndarray, np.generic, jax.Array, int, float))


def check_feed(feed_dict: object) -> None:
    """Raise an error for a `feed_dict` that is not empty."""
    if feed_dict:
        raise UnsupportedError(
            "There is no graph whose tensors could be replaced. Received: a `feed_dict`. Let the input_fn "
            "make the values, and read them from `features` in the model_fn."
        )


class SessionRunContext:
    """A step, or a group of steps between which no hook wants to know anything.

    Args:
        session: the values of the training that runs.
        steps: how many steps the group has.

    >>> context = SessionRunContext(HookSession())
    >>> context.request_stop()
    >>> context.stop_requested
    True
    """

    def __init__(self, session: HookSession, steps: int = 1) -> None:
        self.session = session
        #: The number of steps of the group; how many have run, in `after_run`.
        self.steps = steps
        self._is_stopping = False

    @property
    def original_args(self) -> SessionRunArgs:
        """The training's own request."""
        return SessionRunArgs(None)

    @property
    def stop_requested(self) -> bool:
        """True if a hook has asked to stop."""
        return self._is_stopping

    def request_stop(self) -> None:
        """End the loop after this step."""
        self._is_stopping = True


class SessionRunHook:
    """Code that runs between the steps of training, evaluation or prediction.

    A class that overrides `before_run` or `after_run` is called for each step. One that has
    `steps_until_next`, too, is called when the number of steps that it returned have run, or sooner;
    between calls steps run without waiting for their results.

    >>> class Printer(SessionRunHook):
    ...     def before_run(self, run_context):
    ...         return SessionRunArgs("loss")
    ...     def after_run(self, run_context, run_values):
    ...         print(run_values.results)
    """

    def begin(self) -> None:
        """Run once, before the first step and before a checkpoint is restored."""

    def after_create_session(self, session: HookSession, coord: object) -> None:
        """Run once, when all variables have their values.

        Args:
            session: reads values.
            coord: None.
        """

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Run before a step.

        Args:
            run_context: can end the loop.

        Returns:
            What `after_run` is to get; None for nothing.
        """
        return None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Run after a step.

        Args:
            run_context: can end the loop.
            run_values: what `before_run` has asked for.
        """

    def end(self, session: HookSession) -> None:
        """Run once, when the loop has ended without an error.

        Args:
            session: reads values.
        """
