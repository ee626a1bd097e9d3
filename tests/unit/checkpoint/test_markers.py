"""The marks beside checkpoints."""

import json

from unisono.checkpoint import mark_finished
from unisono.checkpoint._markers import is_watched, read_mark, record_path, remove_mark


def test_each_end_has_a_mark_of_its_own(tmp_path):
    assert read_mark(tmp_path) is None
    mark_finished(tmp_path / "new")
    first = read_mark(tmp_path / "new")
    assert not first.discard
    mark_finished(tmp_path / "new", discard=True)
    second = read_mark(tmp_path / "new")
    assert second.discard
    assert second.name != first.name
    remove_mark(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
    remove_mark(tmp_path / "new")


def test_a_file_that_is_no_mark_is_none(tmp_path):
    for text in ("", "[]", "{}"):
        (tmp_path / "FINISHED").write_text(text)
        assert read_mark(tmp_path) is None


def test_who_watches(tmp_path):
    assert not is_watched(tmp_path)
    for watching in (False, None, True):
        record_path(tmp_path, "test").write_text(json.dumps({"watching": watching}))
        assert is_watched(tmp_path) is (watching is True)
    record_path(tmp_path, "validation").write_text("{")
    assert is_watched(tmp_path)
