"""A training that prints nothing for minutes is poor; a program's own logging is its own."""

import logging

import absl.logging
import pytest

from unisono.estimator.session import _progress
from unisono.estimator.session._progress import shown_progress

LOG = logging.getLogger("unisono")


def bare(monkeypatch, *handlers):
    """Make logging as in a program that has not touched it: pytest has handlers, also in each test."""
    monkeypatch.setattr(logging.root, "handlers", [*handlers])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    monkeypatch.setattr(LOG, "handlers", [])
    monkeypatch.setattr(LOG, "level", logging.NOTSET)
    LOG.manager._clear_cache()


def log_three():
    for i in range(3):
        LOG.info("step = %d", i)


def test_lines_are_printed_occasionally_where_nothing_is_configured(capsys, monkeypatch):
    plain = logging.StreamHandler()
    plain.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    bare(monkeypatch, absl.logging.ABSLHandler(absl.logging.PythonFormatter()), plain)
    now = iter([0.0, 5.0, 11.0, 11.5])
    monkeypatch.setattr(_progress.time, "monotonic", lambda: next(now))
    with shown_progress():
        log_three()
        LOG.warning("seen")
    assert capsys.readouterr().err.splitlines() == ["step = 0", "step = 2", "seen"]
    assert LOG.handlers == []
    assert LOG.level == logging.NOTSET


def test_a_level_or_a_handler_is_the_programs_decision(capsys, monkeypatch):
    bare(monkeypatch)
    LOG.setLevel(logging.ERROR)
    with shown_progress():
        log_three()
    LOG.setLevel(logging.NOTSET)
    logging.root.handlers.append(logging.NullHandler())
    with shown_progress():
        log_three()
    assert capsys.readouterr().err == ""


def test_an_error_ends_it(monkeypatch):
    bare(monkeypatch)
    with pytest.raises(ValueError, match="own"), shown_progress():
        raise ValueError("own")
    assert LOG.handlers == []
