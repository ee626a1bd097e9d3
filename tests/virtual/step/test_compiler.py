"""The cache of programs: what makes a new one, and the word about too many."""

import logging

import keras
import numpy as np
import pytest

from tests.virtual.training._digits import mirrored
from unisono.step._keras_internals import store_value, stored_value


def test_numbers_that_change_as_arrays_need_one_program(caplog):
    strategy = mirrored(2)

    def scaled(x, factor):
        return x * factor

    with caplog.at_level(logging.WARNING, logger="unisono"):
        for i in range(12):
            strategy.run(scaled, args=(np.ones(2, "f4"), np.float32(i)))
    assert not caplog.records


def test_many_programs_for_one_function_are_explained_once(caplog):
    strategy = mirrored(2)

    def scaled(x, factor):
        return x * factor

    with caplog.at_level(logging.WARNING, logger="unisono"):
        for i in range(12):
            strategy.run(scaled, args=(np.ones(2, "f4"), i))
    (record,) = caplog.records
    assert "scaled was compiled 8 times" in record.getMessage()
    assert "as numpy arrays" in record.getMessage()


def test_a_step_that_failed_after_an_assignment_leaves_no_old_array(monkeypatch):
    """An array that the variable had before is put back, as `fit` does after an error: it counts."""
    strategy = mirrored(2)
    with strategy.scope():
        variable = keras.Variable(1.0)

    def step():
        variable.assign_add(1.0)

    strategy.run(step)
    before = stored_value(variable)
    variable.assign(50.0)
    (entry,) = strategy._compiler._entries.values()
    with monkeypatch.context() as patched:
        patched.setattr(entry, "step", None)
        with pytest.raises(TypeError):
            strategy.run(step)
    store_value(variable, before)
    strategy.run(step)
    assert float(variable.value) == 3.0
