"""What an evaluator remembers over restarts."""

import logging

import pytest

from unisono.evaluator._evaluation_history import Evaluation, EvaluationHistory, read_record, write_record

DONE = Evaluation(30, {"loss": 0.5, "accuracy": float("inf")}, "ckpt-1", "abc")


def test_a_record_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "new" / "record.json"
    record = EvaluationHistory([DONE], {"ckpt-1": "s"}, "m")
    assert write_record(path, record)
    assert read_record(path) == record
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert record.has(30, "abc")
    assert not record.has(31, "abc")


@pytest.mark.parametrize(
    ("watching", "goes_on", "kept"), [(True, False, 1), (False, False, 0), (False, True, 1)]
)
def test_another_run_begins_without_evaluations(tmp_path, watching, goes_on, kept):
    write_record(tmp_path / "r", EvaluationHistory([DONE], {"ckpt-1": "s"}, "m", watching))
    record = read_record(tmp_path / "r", goes_on)
    assert len(record.evaluations) == kept
    assert (record.known, record.mark, record.watching) == ({"ckpt-1": "s"}, "m", True)


def test_what_is_gone_is_forgotten():
    record = EvaluationHistory(known={"a": "1", "b": "2"})
    record.forget(["b", "c"])
    assert record.known == {"b": "2"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"evaluations": [{}]}'])
def test_a_damaged_record_is_replaced(tmp_path, caplog, text):
    (tmp_path / "r").write_text(text)
    with caplog.at_level(logging.WARNING, logger="unisono"):
        assert read_record(tmp_path / "r") == EvaluationHistory()
    assert "a new one is started" in caplog.text


def test_a_directory_that_cannot_be_written_costs_the_memory_alone(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, logger="unisono"):
        assert not write_record(tmp_path / "file" / "r", EvaluationHistory())
    assert "a restart evaluates again" in caplog.text
