"""When a server answers, and with what."""

import json
import types

import pytest

from unisono import InvalidArgumentError
from unisono.standalone._server_job import ERROR_BYTES, OutputFiles, is_due, read_seen


def test_output_is_sent_in_messages_of_fifty_milliseconds():
    """However often a process writes: 1000 lines in two seconds are 41 answers at most."""
    answered, count = -1.0, 0
    for tick in range(100):
        now = tick * 0.02
        if is_due(now, now, answered, has_news=True, is_full=False):
            answered, count = now, count + 1
    assert count <= 41


def test_without_news_there_is_one_answer_a_second():
    assert not is_due(5.9, 5.0, 0.0, has_news=False, is_full=False)
    assert is_due(6.0, 5.0, 0.0, has_news=False, is_full=False)


def test_more_than_a_message_holds_does_not_wait():
    assert is_due(5.0, 5.0, 5.0, has_news=True, is_full=True)


@pytest.mark.parametrize("value", [3, [1], [1, 2], ["1", ""], [-1, ""], [1, "", 2], None])
def test_what_a_client_says_to_have_is_checked(value):
    with pytest.raises(InvalidArgumentError):
        read_seen({"key": value})


@pytest.fixture
def files(tmp_path):
    return OutputFiles(tmp_path / "log", tmp_path / "error", tmp_path / "progress")


def test_missing_files_are_empty(files):
    assert (files.read_log(0, 10), files.read_error(), files.read_step()) == (b"", b"", "")


def test_the_version_changes_with_the_error_and_the_end(files):
    versions = [files.version(None)]
    files.error.write_text("{}")
    versions += [files.version(None), files.version(0)]
    assert len(set(versions)) == 3


def test_parts_of_the_log_and_the_last_step(files):
    files.log.write_bytes(b"abcdef")
    files.progress.write_text("1 100.0\n2 101.0\n")
    assert (files.read_log(2, 3), files.read_step()) == (b"cde", "2 101.0")


def test_an_error_that_is_too_large_is_sent_as_text(files):
    record = {
        "at": 1.0,
        "code": 1,
        "summary": "failed",
        "traceback": "Traceback",
        "pickle": "x" * ERROR_BYTES,
    }
    files.error.write_text(json.dumps(record))
    sent = json.loads(files.read_error())
    assert "pickle" not in sent
    assert sent["traceback"] == "Traceback"


def test_an_error_that_the_disk_did_not_take_is_sent_from_memory(files):
    kept = types.SimpleNamespace(error={"at": 1.0, "code": 1, "summary": "failed: full", "traceback": ""})
    assert json.loads(files.read_error(kept))["summary"] == "failed: full"
    files.error.write_text(json.dumps(kept.error | {"summary": "failed: data"}))
    assert json.loads(files.read_error(kept))["summary"] == "failed: data"
