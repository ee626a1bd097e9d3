"""The cache of programs: what makes a new one, and the word about too many."""

import logging

import numpy as np

from tests.virtual.training._digits import mirrored


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
