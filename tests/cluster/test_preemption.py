"""After a real SIGTERM the same command goes on, and ends with the weights of an undisturbed run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster._workers import free_ports

PROGRAM = Path(__file__).parent / "programs" / "preempted.py"


class Trainer:
    """Runs of the program, one after the other."""

    def __init__(self, folder):
        self.folder, self.log, self.expected = folder, folder / "log.txt", {}
        env = dict(os.environ, JAX_COMPILATION_CACHE_DIR=str(folder / "cache"), PJRT_NPROC="2")
        env |= {"PYTHONWARNINGS": "ignore", "KERAS_BACKEND": "jax"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=env,
            )

    def run(self, how, folder=None, wait=None, workers=1):
        """One run; returns each worker's code, whether one got the signal, and their results.

        With `wait=(worker, step)` that worker gets SIGTERM in this step.
        """
        results = [self.folder / f"result-{i}" for i in range(workers)]
        for path in results:
            path.unlink(missing_ok=True)
        run = {
            "how": how,
            "folder": folder and str(folder),
            "result": str(self.folder / "result"),
            "wait": wait,
        }
        if workers > 1:
            run["addresses"] = [f"127.0.0.1:{port}" for port in free_ports(workers)]
        self.process.stdin.write(json.dumps(run) + "\n")
        self.process.stdin.flush()
        preempted = False
        while not (answer := self.process.stdout.readline()).startswith("ended"):
            assert answer, self.log.read_text()
            os.kill(int(answer), signal.SIGTERM)
            preempted = True
        codes = list(map(int, answer.split()[1:]))
        found = [json.loads(path.read_text()) if path.exists() else None for path in results]
        return codes, preempted, found


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    trainer = Trainer(tmp_path_factory.mktemp("runs"))
    yield trainer
    trainer.process.stdin.close()
    trainer.process.wait(60)
    trainer.process.stdout.close()


@pytest.fixture(scope="module")
def undisturbed(trainer):
    """How a loop and a `fit` end that nobody disturbs."""
    found = {how: trainer.run(how) for how in ("fit", "run")}
    assert all(end[:2] == ([0], False) for end in found.values()), trainer.log.read_text()
    return {how: results[0] for how, (_, _, results) in found.items()}


@pytest.mark.parametrize(("how", "code"), [("fit", 42), ("run", 42), ("scope", 7)])
def test_after_sigterm_the_same_command_goes_on(trainer, undisturbed, tmp_path, how, code):
    first, second = (trainer.run(how, tmp_path, wait) for wait in ((0, 9), None))
    assert first == ([code], True, [None]), trainer.log.read_text()
    assert second[:2] == ([0], False), trainer.log.read_text()
    expected = undisturbed["fit" if how == "fit" else "run"]
    assert expected["steps"] == list(range(1, 25))
    assert second[2] == [expected | {"steps": list(range(10, 25))}]


@pytest.mark.timeout(600)
def test_sigterm_for_one_worker_ends_the_fit_of_all_after_the_same_step(trainer, tmp_path):
    """And the same command goes on."""
    undisturbed = trainer.run("fit", workers=2)
    ended, again = (trainer.run("fit", tmp_path, wait, workers=2) for wait in ((1, 9), None))
    assert [run[:2] for run in (undisturbed, ended, again)] == [
        ([0, 0], False),
        ([42, 42], True),
        ([0, 0], False),
    ], trainer.log.read_text()
    assert {result["state"] for result in again[2]} == {undisturbed[2][0]["state"]}
    first, second = (result["steps"] for result in again[2])
    assert first == second == list(range(first[0], 25))
    assert 9 < first[0] < 25


@pytest.mark.timeout(600)
def test_sigterm_for_one_worker_saves_and_ends_all_after_the_same_step(trainer, tmp_path):
    """Each in turn. The workers ask each other after steps 1, 2, 4, 8, 16 at the latest."""
    undisturbed = trainer.run("run", workers=2)
    assert undisturbed[0] == [0, 0], trainer.log.read_text()
    ended = [
        trainer.run(how, tmp_path, wait, workers=2)
        for how, wait in (("run", (0, 9)), ("scope", (1, 18)), ("run", None))
    ]
    assert [codes for codes, _, _ in ended] == [[42, 42], [7, 7], [0, 0]], trainer.log.read_text()
    assert [signalled for _, signalled, _ in ended] == [True, True, False]
    last = ended[-1][2]
    assert {result["state"] for result in last} == {undisturbed[2][0]["state"]}
    assert last[0]["steps"] == last[1]["steps"] == list(range(last[0]["steps"][0], 25))
    assert 18 < last[0]["steps"][0] < 25
