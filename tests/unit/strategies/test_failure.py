"""Whether an exception has ended the program."""

import sys

import pytest

from unisono.strategies.parameter_server import _failure


@pytest.fixture
def seen(monkeypatch):
    """Exceptions that reached the hook before."""
    found = []
    monkeypatch.setattr(_failure, "_HOOKS", [])
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: found.append(error))
    return found


def test_an_exception_that_ends_the_program_is_noted_and_handed_on(seen):
    _failure.watch_program()
    _failure.watch_program()
    assert len(_failure._HOOKS) == 1
    assert not _failure.program_has_failed()
    error = ValueError("the end")
    sys.excepthook(ValueError, error, None)
    assert _failure.program_has_failed()
    assert seen == [error]


def test_an_earlier_error_that_was_handled_does_not_count(seen, monkeypatch):
    _failure.watch_program()
    # As IPython does for each cell that fails.
    monkeypatch.setattr(sys, "last_value", ValueError("handled"), raising=False)
    assert not _failure.program_has_failed()


def test_at_a_prompt_the_user_ends_the_program(seen, monkeypatch):
    _failure.watch_program()
    sys.excepthook(ValueError, ValueError("of a line"), None)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert not _failure.program_has_failed()


def test_a_hook_that_was_set_later_is_watched_too(seen, monkeypatch):
    _failure.watch_program()
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    _failure.watch_program()
    sys.excepthook(ValueError, ValueError("the end"), None)
    assert _failure.program_has_failed()
