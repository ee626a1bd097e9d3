"""What a chief leaves for tasks that are away when the job ends."""

import os
import time

import pytest

from unisono.parameter_server.server import _end_marker
from unisono.parameter_server.server._end_marker import end_marker_of, leave_end_marker, started_at
from unisono.rpc._transport import _local


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(_end_marker, "socket_directory", lambda: _local.socket_directory(str(tmp_path)))
    return _local.socket_directory(str(tmp_path))


def test_a_task_that_was_starting_when_the_job_ended_finds_its_code(directory):
    began = time.time() - 5
    # No file can be left on another machine.
    assert leave_end_marker(["localhost:2222", "10.0.0.1:2222"], 3) == {"localhost:2222"}
    assert end_marker_of("localhost:2223", began) is None
    assert end_marker_of("127.0.0.1:2222", began) == 3
    # It is read once.
    assert end_marker_of("127.0.0.1:2222", began) is None
    assert list(directory.iterdir()) == []


def test_a_task_that_was_started_later_belongs_to_the_next_job(directory):
    leave_end_marker(["localhost:2222"], 0)
    assert end_marker_of("localhost:2222", time.time() + 1) is None


def test_words_that_are_never_read_are_removed(directory):
    leave_end_marker(["localhost:2222"], 0)
    (old,) = directory.iterdir()
    os.utime(old, (1.0, 1.0))
    leave_end_marker(["localhost:2223"], 0)
    assert [path.name for path in directory.iterdir()] == ["127.0.0.1-2223.ended"]


def test_the_start_of_this_process_is_known():
    assert time.time() - 7200 < started_at() < time.time() - 0.05
