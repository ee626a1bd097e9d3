"""The end of a program: its error, as it is shown, and its exit code, as its exit handlers see it."""

import subprocess
import sys

import pytest

from unisono._system import _program_end

PROGRAM = """
import atexit, sys
from unisono._system._program_end import expected_exit_code, note_exits, watch_program
watch_program()
note_exits()
note_exits()
atexit.register(lambda: print(expected_exit_code()))
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("sys.exit()", 0),
        ("sys.exit(3)", 3),
        ("sys.exit(-1)", 255),
        ("sys.exit('no data')", 1),
        ("raise ValueError", 1),
        ("import threading; t = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join()", 0),
    ],
)
def test_the_code_is_known_before_the_end(end, code):
    command = [sys.executable, "-c", PROGRAM + end]
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (code, f"{code}\n")


@pytest.fixture
def seen(monkeypatch, tuned):
    """Exceptions that reached the hook before."""
    found = []
    tuned(_program_end, _HOOKS=[])
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: found.append(error))
    return found


def test_an_exception_that_ends_the_program_is_noted_and_handed_on(seen):
    _program_end.watch_program()
    _program_end.watch_program()
    assert len(_program_end._HOOKS) == 1
    assert not _program_end.program_has_failed()
    error = ValueError("the end")
    sys.excepthook(ValueError, error, None)
    assert _program_end.program_has_failed()
    assert seen == [error]


def test_an_earlier_error_that_was_handled_does_not_count(seen, monkeypatch):
    _program_end.watch_program()
    # As IPython does for each cell that fails.
    monkeypatch.setattr(sys, "last_value", ValueError("handled"), raising=False)
    assert not _program_end.program_has_failed()


def test_at_a_prompt_the_user_ends_the_program(seen, monkeypatch):
    _program_end.watch_program()
    sys.excepthook(ValueError, ValueError("of a line"), None)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert not _program_end.program_has_failed()


def test_a_hook_that_was_set_later_is_watched_too(seen, monkeypatch):
    _program_end.watch_program()
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    _program_end.watch_program()
    sys.excepthook(ValueError, ValueError("the end"), None)
    assert _program_end.program_has_failed()


def test_another_error_may_be_shown_and_is_explained_once(seen, monkeypatch):
    instead = RuntimeError("what it means")
    asked = []
    monkeypatch.setattr(
        _program_end, "EXPLAINERS", [lambda error: instead, lambda error: asked.append(error)]
    )
    _program_end.watch_program()
    ours = sys.excepthook
    # Another tool's hook, between two of ours.
    monkeypatch.setattr(sys, "excepthook", lambda *error: ours(*error))
    _program_end.watch_program()
    sys.excepthook(ValueError, ValueError("a collective has failed"), None)
    assert (seen, asked) == ([instead], [instead])
