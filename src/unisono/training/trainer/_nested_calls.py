"""Calls of `fit`, `train_on_batch` and the like that a callback makes while one of them runs.

They use the same function. The inner call must not get steps that were run ahead for the outer one, nor count
as its batches in a backup, nor change which batch size is usual there.

Tests: tests/virtual/training/test_speculation.py, tests/virtual/callbacks/test_resume.py,
tests/virtual/training/test_counts.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras

from unisono.training.trainer._protocol import (
    lookahead_of,
    plain_function_of,
    set_lookahead,
    set_usual_rows,
    usual_rows_of,
)
from unisono.training.trainer._speculation import Speculation

#: Which attribute of a model holds the function that a method calls.
_FUNCTIONS = {
    "fit": "train_function",
    "train_on_batch": "train_function",
    "evaluate": "test_function",
    "test_on_batch": "test_function",
    "predict": "predict_function",
    "predict_on_batch": "predict_function",
}


@contextlib.contextmanager
def apart_from_outer_call(model: keras.Model, name: str) -> Iterator[None]:
    """Keep a call apart from one that is running; the first batch of a loop says which size is usual."""
    attribute = _FUNCTIONS[name]
    outer = getattr(model, attribute)
    function = plain_function_of(outer)
    setattr(model, attribute, function)
    rows, ahead = usual_rows_of(function), lookahead_of(function)
    set_lookahead(function, None)
    if not name.endswith("_on_batch"):
        set_usual_rows(function, None)
    try:
        yield
    finally:
        if isinstance(ahead, Speculation):
            ahead.continue_from(is_unchanged=False)
        set_lookahead(function, ahead)
        set_usual_rows(function, rows)
        if getattr(model, attribute) is function:
            setattr(model, attribute, outer)
