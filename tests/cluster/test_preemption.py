"""After a real SIGTERM the same command goes on, and ends with the weights of an undisturbed run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

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

    def run(self, how, folder=None):
        """One run; returns its code, whether it got the signal, and its result."""
        result = self.folder / "result.json"
        result.unlink(missing_ok=True)
        line = {"how": how, "folder": folder and str(folder), "result": str(result)}
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()
        preempted = False
        while not (answer := self.process.stdout.readline()).startswith("ended"):
            assert answer, self.log.read_text()
            os.kill(int(answer), signal.SIGTERM)
            preempted = True
        code = int(answer.split()[1])
        return code, preempted, json.loads(result.read_text()) if result.exists() else None


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
    assert all(end[:2] == (0, False) for end in found.values()), trainer.log.read_text()
    return {how: result for how, (_, _, result) in found.items()}


@pytest.mark.parametrize(("how", "code"), [("fit", 42), ("run", 42), ("scope", 7)])
def test_after_sigterm_the_same_command_goes_on(trainer, undisturbed, tmp_path, how, code):
    first, second = (trainer.run(how, tmp_path) for _ in range(2))
    assert first == (code, True, None), trainer.log.read_text()
    assert second[:2] == (0, False), trainer.log.read_text()
    expected = undisturbed["fit" if how == "fit" else "run"]
    assert expected["steps"] == list(range(1, 25))
    assert second[2] == expected | {"steps": list(range(10, 25))}
