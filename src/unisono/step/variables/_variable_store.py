"""Variables by path, for code that makes its layers anew each time it is run.

While a store is entered, Keras' automatic names count from zero, and code that creates a variable gets the
one that an earlier run of it has created under the same path: layers, seed generators, optimizers and metrics
of the second run are new objects around the variables of the first. `training/_variable_calls` asks the store
where Keras makes a variable.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._errors import ContextError, InvalidArgumentError
from unisono._system._blocks import set_for_block
from unisono._types import CallArguments
from unisono.step._keras_internals import current_path, names_from_zero

_STORE: ContextVar[VariablesByPath | None] = ContextVar("unisono_variable_store", default=None)


def current_store() -> VariablesByPath | None:
    """Return the store of the running code, or None."""
    return _STORE.get()


def without_store() -> AbstractContextManager[object]:
    """Let what a block makes be no variable of the running code."""
    return set_for_block(_STORE, None)


class _StoreRun:
    """What one run of the code has made so far."""

    def __init__(self) -> None:
        #: By path: how many variables of this run have asked for it.
        self.counts: dict[str, int] = {}
        self.used: dict[int, keras.Variable] = {}


class VariablesByPath:
    """The variables of code that is run again and again, by their paths.

    >>> store = VariablesByPath()
    >>> with store.entered():
    ...     pass
    >>> store.variables
    {}
    """

    def __init__(self) -> None:
        self._by_path: dict[str, keras.Variable] = {}
        self._known: set[int] = set()
        self._paths: dict[int, str] = {}
        #: The class that was asked for, by path: a strategy may make another kind of variable of it.
        self._classes: dict[str, type] = {}
        #: The value with which the last run would have made a variable: that of a hyperparameter, such as a
        #: learning rate, which is no state. Only where it was a number, and no initializer.
        self.given: dict[str, np.ndarray] = {}
        self._run = _StoreRun()
        #: Whether a run that needs a variable which is not there is an error.
        self.is_closed = False

    @property
    def variables(self) -> dict[str, keras.Variable]:
        """All variables by path."""
        return dict(self._by_path)

    @property
    def used(self) -> list[keras.Variable]:
        """The variables of the run that is entered, or of the last one, in the order of their making."""
        return list(self._run.used.values())

    @property
    def trainable_variables(self) -> list[keras.Variable]:
        """Those of `used` that are trainable."""
        return [v for v in self.used if v.trainable]

    @contextlib.contextmanager
    def entered(self) -> Iterator[VariablesByPath]:
        """Let the code of a block, which is one run, get its variables from here."""
        outer = self._run if _STORE.get() is self else None
        self._run = _StoreRun()
        try:
            with set_for_block(_STORE, self), names_from_zero():
                yield self
        finally:
            # Where a run is executed again while it runs, the outer one continues.
            if outer is not None:
                self._run = outer

    # --- what Keras' constructor of variables asks ------------------------------------------------

    def allocate(
        self, cls: type, make: Callable[[], keras.Variable], arguments: CallArguments
    ) -> keras.Variable:
        """Return the object for a variable that is being created: that of an earlier run, or a new one.

        Args:
            cls: the class that is called.
            make: returns a new object.
            arguments: of the class.
        """
        automatic = "variable" if cls.__name__ == "Variable" else cls.__name__.lower()
        name = _bound(cls, arguments).get("name") or automatic
        path = self._unique(f"{prefix}/{name}" if (prefix := current_path()) else name)
        found = self._by_path.get(path)
        if found is None:
            if self.is_closed:
                raise ContextError(
                    "The same variables must be made each time a model_fn is run. Received: a new variable "
                    f"{path!r}. Do not let clocks, counters or random numbers decide what is made."
                )
            found = make()
            self._by_path[path] = found
            self._paths[id(found)] = path
            self._classes[path] = cls
        elif self._classes[path] is not cls:
            raise InvalidArgumentError(
                f"The same variables must be made each time a model_fn is run. Received: {path!r} as a "
                f"{cls.__name__}, which was a {self._classes[path].__name__}. Use other names."
            )
        self._run.used[id(found)] = found
        return found

    def is_made(self, variable: keras.Variable) -> bool:
        """Return whether a variable that is being created exists already.

        Args:
            variable: what `allocate` returned.
        """
        return id(variable) in self._known

    def made(self, variable: keras.Variable) -> None:
        """Note that a variable was created.

        Args:
            variable: what `allocate` returned.
        """
        self._known.add(id(variable))

    def arguments(self, variable: keras.Variable, arguments: CallArguments) -> CallArguments:
        """Return the arguments with which Keras makes a variable inside a step.

        Args:
            variable: what `allocate` returned.
            arguments: what Keras' constructor was given.
        """
        given = _bound(keras.Variable, arguments)
        given["name"] = self._paths[id(variable)].rpartition("/")[2]
        initial = given["initializer"]
        if callable(initial) or isinstance(initial, str):
            return (), given
        # Keras makes variables of ready values in eager code alone.
        value = _constant(initial, given.get("dtype"), str(given["name"]))
        self.given[self._paths[id(variable)]] = value
        given["initializer"] = lambda shape, dtype: jnp.asarray(value, dtype)
        given["shape"], given["dtype"] = value.shape, str(value.dtype)
        return (), given

    def reuse(self, variable: keras.Variable, arguments: CallArguments) -> None:
        """Check that a variable fits what a later run asks for.

        Args:
            variable: what `allocate` returned.
            arguments: what Keras' constructor was given.
        """
        given = _bound(keras.Variable, arguments)
        initial, shape = given.get("initializer"), given.get("shape")
        if not (callable(initial) or isinstance(initial, str)):
            value = _constant(initial, given.get("dtype"), variable.path)
            self.given[self._paths[id(variable)]] = value
            shape = value.shape
        if shape is not None and _sizes(shape) != tuple(variable.shape):
            raise InvalidArgumentError(
                "The same variables must be made each time a model_fn is run. Received: "
                f"{variable.path!r} of shape {_sizes(shape)}, which was {tuple(variable.shape)}. Its shape "
                "must not depend on the mode or the batch."
            )
        # As a new one would begin; a layer that is frozen says so again.
        variable.trainable = bool(given.get("trainable", True))

    def path_of(self, variable: keras.Variable) -> str | None:
        """Return the path of a variable; None for one of another origin.

        Args:
            variable: any.
        """
        return self._paths.get(id(variable))

    def _unique(self, path: str) -> str:
        """Return a path that no variable of this run has asked for: `a/b`, then `a/b_1`."""
        count = self._run.counts.get(path, 0)
        self._run.counts[path] = count + 1
        return path if count == 0 else self._unique(f"{path}_{count}")


def _bound(cls: type, arguments: CallArguments) -> dict[str, Any]:
    """Return the arguments of a constructor by name."""
    signature = inspect.signature(cls.__init__)  # type: ignore[misc]
    bound = signature.bind_partial(None, *arguments[0], **arguments[1]).arguments
    named: dict[str, Any] = dict(bound)
    named.pop("self", None)
    extra: Mapping[str, object] = named.pop("kwargs", {})
    return {**named, **extra}


def _sizes(shape: Sequence[int] | int) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


def _constant(value: object, dtype: object, name: str) -> np.ndarray:
    """Return the first value of a variable as an array of the host, in the type that Keras gives it."""
    if isinstance(value, jax.core.Tracer):
        raise InvalidArgumentError(
            "A variable must begin with a value that is known when it is made. Received: a tensor that the "
            f"step computes, for {name!r}. Pass a number, or an initializer."
        )
    kind = None if dtype is None else keras.backend.standardize_dtype(dtype)
    with jax.ensure_compile_time_eval():
        return np.asarray(keras.ops.convert_to_tensor(value, dtype=kind))
