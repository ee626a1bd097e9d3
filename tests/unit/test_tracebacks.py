"""What a user sees of an error that the library raises on purpose."""

import inspect
import pickle
import sys

import pytest

import unisono
from unisono import _errors, _tracebacks

ERRORS = [c for _, c in inspect.getmembers(_errors, inspect.isclass) if issubclass(c, _errors.UnisonoError)]


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_are_named_as_programs_write_them(kind):
    assert getattr(unisono, kind.__name__) is kind
    assert repr(kind) == f"<class 'unisono.{kind.__name__}'>"
    assert type(pickle.loads(pickle.dumps(kind("text")))) is kind


def test_a_users_own_error_stays_in_its_module():
    class OwnError(unisono.UnisonoError):
        pass

    assert OwnError.__module__ == __name__


def a_mistake():
    unisono.ReduceOp.parse("max")


def shown(capsys, raises):
    """What Python prints at the end of a program that `raises`."""
    try:
        raises()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
    return capsys.readouterr().err


def test_only_frames_of_the_user_are_shown(capsys, monkeypatch):
    monkeypatch.delenv("UNISONO_TRACEBACK", raising=False)
    text = shown(capsys, a_mistake)
    assert 'unisono.ReduceOp.parse("max")' in text
    assert "unisono.InvalidArgumentError: `reduce_op` must be" in text
    assert "_values.py" not in text
    assert "UNISONO_TRACEBACK=full" in text


def test_all_frames_are_shown_on_demand(capsys, monkeypatch):
    monkeypatch.setenv("UNISONO_TRACEBACK", "full")
    text = shown(capsys, a_mistake)
    assert "_values.py" in text
    assert "UNISONO_TRACEBACK" not in text


def test_the_users_functions_between_are_kept(capsys, monkeypatch):
    monkeypatch.delenv("UNISONO_TRACEBACK", raising=False)
    strategy = unisono.OneDeviceStrategy("cpu:0")

    def step():
        a_mistake()

    text = shown(capsys, lambda: strategy.run(step))
    assert "strategy.run(step)" in text
    assert "a_mistake()" in text
    assert "_compiler.py" not in text
    assert "jax" not in text.replace("jax.", "")


def test_other_errors_are_shown_whole(capsys):
    text = shown(capsys, lambda: unisono.Variable("not a number"))
    assert "_variable.py" in text
    assert "UNISONO_TRACEBACK" not in text


def test_an_error_without_frames_of_the_user_keeps_its_own():
    error = unisono.ContextError("text")
    _tracebacks.shorten(error)
    assert error.__traceback__ is None
