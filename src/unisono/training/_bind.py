"""Installs what the library replaces in Keras.

Each subject says in a function `wraps()` which methods it replaces, and by what; `wrap_keras` puts them
there. A wrap asks where it is called: outside every strategy and for a model that no strategy holds, it does
exactly what Keras does. Who holds what is in `_binding`, what happens inside a replica in `_replica_patches`.

Tests: tests/virtual/training/test_exact.py and test_failures.py.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from unisono._features import load
from unisono._lowering._install import install_lowerings
from unisono._system._program_end import EXPLAINERS
from unisono._system._replacements import Replacement, put, when_undone, where_defined
from unisono._types import KerasWrap, Wrapper
from unisono.step._keras_internals import check_keras, check_wraps
from unisono.training import (
    _chief_save,
    _fit_extension,
    _initial_values,
    _model_calls,
    _replica_patches,
    _step_form,
    _variable_calls,
)
from unisono.training.groups import _batch_policy
from unisono.training.trainer import _run_ahead_of_loop

#: Those that replace methods of Keras.
_SUBJECTS = (
    _variable_calls,  # where variables are created, assigned and read
    _initial_values,  # initializers of all shapes share programs
    _batch_policy,  # the number of rows that a `Sequential` is built with
    _model_calls,  # compile, fit, evaluate, predict, and the functions that they call
    _step_form,  # Keras' own steps within steps in TensorFlow's form
    _replica_patches,  # losses, metrics and optimizers inside of a replica
    _run_ahead_of_loop,  # callbacks of steps that run ahead
    _chief_save,  # files, which the first of several workers writes, and optimizers' variables in them
    _fit_extension,  # Keras' TensorBoard, without TensorFlow, and `History`, which has metrics alone
)


def wrap_keras() -> None:
    """Replace what the library replaces in Keras; nothing is done the second time.

    Strategies do so when they are made. Without one, `fit` takes Unisono's data sets from then on.

    >>> wrap_keras()
    """
    put(__name__, _replacements())


def _replacements() -> Iterator[Replacement]:
    check_keras()
    wraps = [wrap for subject in _SUBJECTS for wrap in subject.wraps()]
    check_wraps(wraps)
    install_lowerings()
    yield from map(_replacement, wraps)


def _explain_last_error(error: BaseException) -> None:
    """Add a note to an error that ends the program, where it is about a value of a step or of `reduce`."""
    load("explanation of a last error")(error)


EXPLAINERS.append(_explain_last_error)


def _replacement(wrap: KerasWrap) -> Replacement:
    """Return the replacement of a method, or a function, by `wrapper(original, self, ...)`.

    Keras compares `Model.compile` with its own to find out whether a user overrides it.
    """
    owner, name, wrapper = wrap
    if name == "__new__":
        # Not in a base class, which has it for others, too.
        return owner, name, functools.partial(_constructor, wrapper)
    if name == "__setattr__":
        return owner, name, functools.partial(_method, wrapper)
    if isinstance(owner, types.ModuleType):
        # Its first argument may have been given by name.
        return owner, name, lambda own: functools.wraps(own)(functools.partial(wrapper, own))
    return where_defined(owner, name, functools.partial(_method, wrapper))


def _constructor(wrapper: Wrapper, make: Callable[..., object]) -> object:
    return staticmethod(lambda cls, *args, **kwargs: wrapper(make, cls, *args, **kwargs))


def _method(wrapper: Wrapper, original: Any) -> object:
    if isinstance(original, property):
        return property(functools.partial(wrapper, original.fget), doc=original.__doc__)
    original, cell = _apart(original)

    @functools.wraps(original)
    def method(self: object, *args: object, **kwargs: object) -> object:
        return wrapper(original, self, *args, **kwargs)

    # Keras looks at the arguments of a layer's `__init__` to save it. It copies `build` into each layer
    # with all attributes, but without `self`.
    if original.__name__ != "build":
        method.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    if cell is not None:
        when_undone(setattr, cell, "cell_contents", cell.cell_contents)
        cell.cell_contents = method
    return method


def _apart(original: Callable[..., Any]) -> tuple[Callable[..., Any], types.CellType | None]:
    """Return a copy of a decorated method, and the cell in which the method has what it calls.

    Python looks up `model.fit` before it evaluates the arguments of the call, and one of these may be the
    first that wraps Keras: `model.fit(x, callbacks=[unisono.callbacks.BackupAndRestore("backup")])`. So what
    was looked up calls the new method, too.

    Returns:
        The method itself and None, where it is not a function that a decorator has made.
    """
    called, cells = getattr(original, "__wrapped__", None), getattr(original, "__closure__", None) or ()
    found = next((cell for cell in cells if called is not None and cell.cell_contents is called), None)
    if found is None:
        return original, None
    own = tuple(types.CellType(called) if cell is found else cell for cell in cells)
    copy = types.FunctionType(
        original.__code__, original.__globals__, original.__name__, original.__defaults__, own
    )
    functools.update_wrapper(copy, original)
    copy.__wrapped__ = called  # type: ignore[attr-defined]
    return copy, found
