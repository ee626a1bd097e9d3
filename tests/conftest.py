"""A test leaves the process as it found it."""

import gc
import os
import threading
import time

import hypothesis
import pytest

# No limits on time: the machine may be busy. And the same examples in each run, so that a change
# is not blamed for one that was found by chance.
hypothesis.settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")


def _working():
    return {t for t in threading.enumerate() if not t.daemon}


def wait_for_threads(before, seconds=30.0):
    """The threads that are still there after a grace period: ends are not instantaneous."""
    deadline, pause = time.monotonic() + seconds, 0.02
    while (left := _working() - before) and time.monotonic() < deadline:
        # A traceback of the test may hold, in a circle, what ends its threads when it is dropped; a daemon
        # thread may hold the traceback a little longer.
        gc.collect()
        time.sleep(pause)
        pause = min(1.0, 2 * pause)
    return left


@pytest.fixture
def tuned(monkeypatch):
    """Set constants of a module until the test ends, such as `tuned(_client, RETRY_AFTER=0.05)`."""

    def tune(module, **constants):
        for name, value in constants.items():
            assert name.isupper(), f"{name} is not the name of a constant"
            monkeypatch.setattr(module, name, value)

    return tune


@pytest.fixture(autouse=True)
def nothing_leaks():
    """Fail a test that leaves a non-daemon thread or another environment behind."""
    threads, environment = _working(), dict(os.environ)
    yield
    left = wait_for_threads(threads)
    assert not left, f"the test left threads behind: {sorted(t.name for t in left)}"
    now = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    environment.pop("PYTEST_CURRENT_TEST", None)
    changed = {k for k in now.keys() | environment.keys() if now.get(k) != environment.get(k)}
    assert not changed, f"the test changed the environment: {sorted(changed)}"
