"""The evaluator's example, launched as its first lines say, with a worker that is killed in it."""

import json
import os
import re
import signal
from pathlib import Path

import keras
import pytest

from tests.cluster.launch_support import launched, until
from tests.event_files import scalars

EXAMPLE = Path(__file__).parents[2] / "examples" / "multi_worker_evaluator.py"
EPOCHS, STEPS = 5, 30

#: Training waits at the end of each epoch until it is evaluated, so that none is overtaken; after the
#: second, before its backup, it waits to be ended.
SCRIPT = f"""
import functools, runpy
os.chdir(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, {str(EXAMPLE.parent)!r})
import unisono
import keras

def evaluated():
    record = "run/checkpoints/evaluations-evaluator.json"
    return [e["name"] for e in json.load(open(record))["evaluations"]] if os.path.exists(record) else []

class Waiting(keras.callbacks.ModelCheckpoint):
    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        deadline = time.monotonic() + 300
        while f"{{epoch + 1:02d}}.keras" not in evaluated() or (generation == 0 and epoch == 1):
            if generation == 0 and epoch == 1 and len(evaluated()) == 2:
                open("killable", "w").close()
            if time.monotonic() > deadline:
                raise TimeoutError(f"only {{evaluated()}} were evaluated")
            time.sleep(0.05)

keras.callbacks.ModelCheckpoint = Waiting
unisono.SidecarEvaluator = functools.partial(unisono.SidecarEvaluator, poll_interval=0.1)
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""


@pytest.mark.timeout(600)
def test_each_epoch_is_evaluated_once_although_a_worker_is_killed(tmp_path):
    flags = ("-n", "2", "--evaluator", "--max-restarts", "1", "--spares", "0")
    with launched(tmp_path, SCRIPT, *flags, forks=True) as run:
        # Each wait has a limit of its own: the machine may be busy.
        run.wait_for_log("worker:0", "Epoch 1/5")
        wait_for_evaluations(run, 2)
        until(lambda: (tmp_path / "killable").exists(), "the chief")
        os.kill(run.wait_for("started", task="worker:1")["pid"], signal.SIGKILL)
        run.wait_for("started", task="evaluator:0", generation=1)
        run.wait_for_log("worker:0", "Epoch 3/5")
        wait_for_evaluations(run, EPOCHS)
        assert run.end() == 0
        log = run.log("evaluator:0")
        assert len(run.history("started", task="evaluator:0")) == 2
        assert [e["detail"] for e in run.history("ending")] == ["failed"]
        assert "training has ended; waiting for the evaluator" in run.err
    record = json.loads((tmp_path / "run/checkpoints/evaluations-evaluator.json").read_text())
    found = record["evaluations"]
    # Epoch 2 was trained and saved again, with the same bits, and not evaluated again.
    assert [e["name"] for e in found] == [f"{i:02d}.keras" for i in range(1, EPOCHS + 1)]
    steps = [STEPS * i for i in range(1, EPOCHS + 1)]
    assert [e["step"] for e in found] == steps
    assert [int(s) for s in re.findall(r"^checkpoint step (\d+): loss", log, re.MULTILINE)] == steps
    assert f"The best of {EPOCHS}: step" in log
    assert not record["watching"]
    check_numbers(tmp_path / "run", found)


def wait_for_evaluations(run, count):
    """One after the other."""
    for i in range(1, count + 1):
        until(
            lambda i=i: (
                run.log("evaluator:0").count("checkpoint step") >= i or run.process.poll() is not None
            ),
            f"{i} evaluations",
        )


def check_numbers(folder, found):
    """Each is what plain Keras finds on one device; a strategy adds in another order, in the last bits."""
    import runpy

    _, test = runpy.run_path(str(EXAMPLE.parent / "_digits.py"))["load"]()
    model = keras.saving.load_model(folder / "checkpoints" / found[0]["name"])
    for each in found:
        model.load_weights(folder / "checkpoints" / each["name"])
        expected = model.evaluate(*test, verbose=0, return_dict=True)
        assert each["results"] == {name: pytest.approx(v, rel=1e-6) for name, v in expected.items()}
    for name in ("loss", "accuracy"):
        written = scalars(folder / "logs" / "evaluator", f"evaluation_{name}_vs_iterations")
        assert written == [(e["step"], pytest.approx(e["results"][name], rel=1e-6)) for e in found]
