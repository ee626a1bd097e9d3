"""What a task says is kept where its log cannot be written: its last lines, and its exception."""

import contextlib
import json
import os
import subprocess
import sys

import pytest

from unisono.launcher import _task
from unisono.launcher._processes import KeptOutput


@pytest.fixture
def kept():
    output = KeptOutput()
    yield output
    output.close()


def test_the_last_of_what_a_task_wrote_is_kept(kept):
    for i in range(3000):
        os.write(kept.descriptor, b"line %d of some more text\n" % i)
        if i % 100 == 0:
            kept.read()
    kept.read()
    assert kept.last_lines(2) == "line 2998 of some more text\nline 2999 of some more text"
    assert kept.error is None
    record = {"at": 1.0, "code": 1, "summary": "failed: OSError", "traceback": "Traceback"}
    os.write(kept.descriptor, b"\0" + json.dumps(record).encode() + b"\0")
    kept.given()
    kept.read()
    kept.close()
    assert kept.error == record
    assert kept.last_lines(1) == "line 2999 of some more text"


def test_a_program_may_print_zeros(kept):
    record = {"at": 1.0, "code": 1, "summary": "failed: OSError", "traceback": "Traceback"}
    os.write(kept.descriptor, b"\xff\xfeab\0c\n\0" + json.dumps(record).encode() + b"\0at its end\n")
    kept.read()
    assert kept.error == record
    assert kept.last_lines().splitlines()[-1] == "at its end"


def test_nobody_waits_for_the_other_end(kept):
    kept.read()
    assert kept.last_lines() == ""
    written = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            written += os.write(kept.descriptor, b"x" * 1000)
    kept.given()
    kept.read()
    kept.read()
    assert len(kept.last_lines()) == written


def run(folder, kept, program, log, error=None):
    """Run a task as the launcher does; return its exit code."""
    (folder / "train.py").write_text(program)
    job = {"log": str(log), "environ": {}, "sys_path": None, "kind": "script", "args": []}
    job |= {
        "target": str(folder / "train.py"),
        "error": str(error or f"{log}/error"),
        "kept": kept.descriptor,
    }
    command = [sys.executable, _task.__file__, str(os.getpid())]
    task = subprocess.run(
        command, input=json.dumps(job).encode(), pass_fds=(kept.descriptor,), timeout=60, check=False
    )
    kept.given()
    kept.read()
    return task.returncode


@pytest.mark.parametrize("log", ["/dev/full", "/nowhere/log"])
@pytest.mark.parametrize("how", ["raises", "exits"])
def test_a_task_without_a_log_tells_the_launcher_why_it_ended(tmp_path, kept, log, how):
    end = {"raises": "raise OSError(28, 'the disk is full')", "exits": "sys.exit(3)"}[how]
    program = "import sys\nfor i in range(40):\n    print('line', i)\nprint('last', file=sys.stderr)\n" + end
    code = run(tmp_path, kept, program, log)
    error = kept.error
    assert {"line 39", "last"} <= set(kept.last_lines().splitlines())
    if how == "raises":
        assert (code, error["code"], error["summary"]) == (
            1,
            1,
            "failed: OSError: [Errno 28] the disk is full",
        )
        assert error["traceback"].splitlines()[-1] == "OSError: [Errno 28] the disk is full"
    else:
        assert (code, error["code"], error["summary"]) == (3, 3, "failed with exit code 3")


def test_a_task_says_that_it_has_saved_before_python_ends(tmp_path, kept):
    program = """
import atexit, pathlib, sys
atexit.register(lambda: print(pathlib.Path(__file__).with_name("error").read_text()))
sys.exit(42)
"""
    assert run(tmp_path, kept, program, tmp_path / "log", tmp_path / "error") == 42
    assert json.loads((tmp_path / "log").read_text())["code"] == 42


def test_a_task_with_a_log_keeps_nothing(tmp_path, kept):
    assert run(tmp_path, kept, "print('all is well')", tmp_path / "log") == 0
    assert (tmp_path / "log").read_text() == "all is well\n"
    assert kept.last_lines() == ""
