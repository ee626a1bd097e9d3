"""`unisono.launch`: a function on several processes."""

import json
import os
import signal
import sys
import time

import jax
import pytest

import unisono
from unisono import ClusterError, InvalidArgumentError, InvalidTypeError


def test_twice_in_a_row_while_jax_runs_here(capfd):
    jax.numpy.ones(3).sum().block_until_ready()
    scale = 10

    def work(offset):
        resolver = unisono.cluster_resolver.TFConfigClusterResolver()
        print("at work", resolver.task_id)
        return scale * resolver.task_id + offset, os.getpid(), os.environ["UNISONO_DEVICES_PER_WORKER"]

    first = unisono.launch(work, workers=2, args=(1,))
    second = unisono.launch(work, workers=3, args=(2,), devices_per_worker=2)
    assert [value for value, _, _ in first] == [1, 11]
    assert [value for value, _, _ in second] == [2, 12, 22]
    assert {devices for _, _, devices in second} == {"2"}
    assert len({os.getpid(), *(pid for _, pid, _ in first + second)}) == 6
    assert capfd.readouterr().out == "[worker:0] at work 0\n" * 2


class OursError(Exception):
    def __init__(self, number, text):
        super().__init__(number, text)
        self.number = number


def test_an_exception_is_raised_here_with_its_traceback():
    def work():
        if unisono.cluster_resolver.TFConfigClusterResolver().task_id == 1:
            raise OursError(7, "here")
        time.sleep(600)

    with pytest.raises(OursError) as caught:
        unisono.launch(work)
    assert caught.value.number == 7
    assert 'raise OursError(7, "here")' in str(caught.value.__cause__)
    assert "worker:1" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: sys.exit(5), "failed with exit code 5"),
        (lambda: sys.exit(0), "whose process exited with code 0"),
    ],
)
def test_a_worker_that_ends_otherwise(ending, words):
    with pytest.raises(ClusterError, match=words):
        unisono.launch(ending, workers=1)


def test_an_exception_that_cannot_be_sent_keeps_its_text():
    def work():
        error = ValueError("with a lock")
        error.lock = __import__("threading").Lock()
        raise error

    with pytest.raises(ClusterError, match="ValueError: with a lock"):
        unisono.launch(work, workers=1)


def test_the_time_is_limited():
    with pytest.raises(ClusterError, match=r"timeout=0\.5"):
        unisono.launch(lambda: time.sleep(600), timeout=0.5)


def test_an_interrupt_ends_the_workers(tmp_path):
    def work(folder):
        (folder / str(os.getpid())).touch()
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.01)
        # One: a second would interrupt what the first began, or the next test.
        if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0:
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(600)

    with pytest.raises(KeyboardInterrupt):
        unisono.launch(work, args=(tmp_path,))
    assert not any(os.path.exists(f"/proc/{path.name}") for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"fn": 3}, InvalidTypeError, "must be a function"),
        ({"fn": print, "workers": 0}, InvalidArgumentError, "workers=0"),
        ({"fn": print, "args": (sys._getframe(),)}, InvalidArgumentError, "sent to another process"),
    ],
)
def test_what_cannot_be_called(arguments, error, words):
    with pytest.raises(error, match=words):
        unisono.launch(**arguments)
