"""What the launcher does with its signals."""

import os
import signal

import pytest

from unisono.launcher._launch import stop_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_signals_are_noted_unless_they_are_ignored(number):
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with stop_signals() as stop_requests:
            os.kill(os.getpid(), number)
            assert stop_requests == [number]
        assert signal.getsignal(number) == signal.SIG_DFL
        # As `nohup`, or a shell for a job in its background.
        signal.signal(number, signal.SIG_IGN)
        with stop_signals() as stop_requests:
            os.kill(os.getpid(), number)
            assert stop_requests == []
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)
