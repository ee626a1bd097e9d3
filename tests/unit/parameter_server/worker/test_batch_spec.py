"""The form of batches as a text."""

import ml_dtypes
import numpy as np
import pytest

from unisono._errors import InvalidTypeError
from unisono.parameter_server.worker._batch_spec import describe, rebuild


@pytest.mark.parametrize(
    "batch",
    [
        np.zeros((2, 3), np.float32),
        (np.zeros(2), None, [np.int8(1), {"b": 2.5, "a": np.zeros((0, 4), bool)}]),
        {},
        ({"x": np.zeros((1,), ml_dtypes.bfloat16)},),
    ],
)
def test_a_form_is_rebuilt_around_other_leaves(batch):
    text, leaves = describe(batch)
    rebuilt = iter(leaves)
    again, others = describe(rebuild(text, lambda dtype, shape: next(rebuilt)))
    assert again == text
    assert all(a is b for a, b in zip(leaves, others, strict=True))
    shapes = []
    rebuild(text, lambda dtype, shape: shapes.append((dtype, shape)))
    assert shapes == [(x.dtype, x.shape) for x in leaves]


def test_batches_of_other_forms_have_other_texts():
    texts = {
        describe(b)[0] for b in (np.zeros(2), np.zeros(3), (np.zeros(2),), [np.zeros(2)], np.zeros(2, int))
    }
    assert len(texts) == 5


def test_strings_are_refused():
    with pytest.raises(InvalidTypeError, match="must be arrays of numbers"):
        describe(np.array(["a"]))
