"""Operations of a trace in a user's words."""

import pytest

from unisono.training.rows._row_words import in_words


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("iota", "`arange` or `eye` over rows"),
        ("jvp(): concatenate", "`concatenate`"),
        ("jvp(): integer_pow", "a power"),
        ("transpose(jvp(model/dense)): reduce_sum", "model/dense: a sum"),
        ("model/scaled: reduce_argmax", "model/scaled: `argmax`"),
        ("operations that depend on the number of rows", "operations that depend on the number of rows"),
    ],
)
def test_words(place, text):
    assert in_words(place) == text
