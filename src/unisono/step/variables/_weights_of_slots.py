"""The weight for which an optimizer's variable was made: on several devices a slot lies as its weight.

Tests: tests/virtual/strategies/test_local_updates_of_grids.py.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import keras

#: The attribute of an optimizer's variable that is made for a weight: a weak reference to it.
_WEIGHT = "_unisono_weight"


def note_weight(variable: keras.Variable, weight: keras.Variable | None) -> None:
    """Note for which weight an optimizer's variable is made, if it has the weight's form."""
    if weight is not None and tuple(weight.shape) == tuple(variable.shape):
        object.__setattr__(variable, _WEIGHT, weakref.ref(weight))


def weight_of(variable: keras.Variable) -> keras.Variable | None:
    """Return the weight for which an optimizer's variable was made; None for another."""
    reference = getattr(variable, _WEIGHT, None)
    return None if reference is None else reference()


@contextlib.contextmanager
def noting_weights(optimizer: keras.Optimizer) -> Iterator[None]:
    """Note in a block for which weight each variable is that an optimizer makes; no strategy sees these."""
    make = optimizer.add_variable_from_reference

    def noted(reference: keras.Variable, *args: Any, **kwargs: Any) -> keras.Variable:
        variable = make(reference, *args, **kwargs)
        note_weight(variable, reference)
        return variable

    object.__setattr__(optimizer, "add_variable_from_reference", noted)
    try:
        yield
    finally:
        object.__delattr__(optimizer, "add_variable_from_reference")
