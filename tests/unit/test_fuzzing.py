"""A few random changes of every format that the library reads; `make soak` tries many more."""

import logging

import pytest
from tests.fuzzing.__main__ import TARGETS, fuzz
from tests.fuzzing.changes import changed_bytes, changed_json


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
def test_what_was_changed_is_read_or_passed_over_or_a_clear_error(target, tmp_path):
    logging.disable(logging.CRITICAL)
    try:
        fuzz(target, tmp_path, 15)
    finally:
        logging.disable(logging.NOTSET)


def test_what_is_not_changed_is_read(tmp_path):
    """Else every case could end with the same error, and show nothing."""
    (tmp_path / "inner").mkdir()
    for i, target in enumerate(TARGETS):
        folder = tmp_path / str(i)
        folder.mkdir()
        target(folder).run(target.unchanged)


def test_changes_change_a_copy():
    value = {"a": [1, {"b": 2}]}
    steps = [("replace", [0, 0], 7), ("rename", [0], "c"), ("add", [], "d", None), ("copy", [0, 1], [0])]
    assert changed_json(value, steps)["d"] is None
    assert value == {"a": [1, {"b": 2}]}
    assert changed_json(value, [("remove", [0, 1, 0])]) == {"a": [1, {}]}
    assert changed_bytes(b"abc", [("cut", 0.4)]) == b"a"
    assert changed_bytes(b"abc", [("flip", 0.0, 0), ("insert", 0.9, b"x")]) == b"`bxc"
