"""A whole number is Python's or NumPy's, and neither a truth value nor a float."""

import re

import jax
import keras
import numpy as np
import pytest

from unisono import InvalidArgumentError, InvalidTypeError
from unisono._checks import check_instance, checked_whole, is_number, whole_number, whole_numbers


@pytest.mark.parametrize("value", [2, np.int64(2), np.uint8(2), np.array(2)])
def test_whole_numbers_become_ints(value):
    assert type(whole_number(value, 1)) is int
    assert whole_number(value, 2) == 2
    assert whole_number(value, 3) is None


@pytest.mark.parametrize("value", [True, np.True_, 2.0, np.float32(2), "2", None, [2], np.array([2])])
def test_all_else_is_none(value):
    assert whole_number(value, 0) is None


def test_one_that_is_no_whole_number_is_found():
    assert whole_numbers([np.int64(1), 2], 1) == [1, 2]
    assert whole_numbers([], 1) == []
    assert whole_numbers([1, 0], 1) is None
    assert whole_numbers([1, None], 1) is None


def test_a_number_that_is_not_known_while_tracing_is_none():
    found = []
    jax.jit(lambda n: found.append(whole_number(n, 0)))(2)
    assert found == [None]


@pytest.mark.parametrize("address", ["file:///run", "http://host/run", "zip://run", "dbfss://b/run"])
def test_an_address_is_no_directory(address):
    import unisono

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    checkpoint = unisono.checkpoint.Checkpoint(model=model)
    for use in (
        checkpoint.save,
        checkpoint.write,
        checkpoint.restore,
        unisono.checkpoint.latest_checkpoint,
        unisono.checkpoint.mark_finished,
        unisono.callbacks.BackupAndRestore,
        lambda path: unisono.checkpoint.CheckpointManager(checkpoint, path),
        unisono.callbacks.TensorBoard,
        unisono.summary.create_file_writer,
        unisono.data.Dataset.range(3).save,
        unisono.data.Dataset.range(3).cache,
        unisono.data.Dataset.load,
        lambda path: unisono.export.export(model, path),
        unisono.export.load,
        lambda path: unisono.estimator.RunConfig(model_dir=path),
    ):
        with pytest.raises(unisono.UnsupportedError, match=re.escape(f"Received: '{address}")):
            use(address)


def test_a_checked_number_is_whole_and_not_too_small():
    assert checked_whole(np.int64(3), "count", 3, "") == 3
    with pytest.raises(InvalidTypeError, match=r"whole number\. Received: count=True\. Write 3"):
        checked_whole(True, "count", 1, "Write 3.")
    with pytest.raises(InvalidArgumentError, match=r"count must be at least 1\. Received: count=0\. W"):
        checked_whole(0, "count", 1, "Write 3.")


@pytest.mark.parametrize("value", [3, 0.5, np.float32(2), np.int8(1)])
def test_numbers(value):
    assert is_number(value)


@pytest.mark.parametrize("value", [True, "3", None, [3], 1j])
def test_what_is_no_number(value):
    assert not is_number(value)


def test_another_type_is_named_with_what_to_write():
    check_instance(3, "count", int, "")
    with pytest.raises(
        InvalidTypeError, match=r"^`count` must be a `int`\. Received: count='3'\. Write 3\.$"
    ):
        check_instance("3", "count", int, "Write 3.")
