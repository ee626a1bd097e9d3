"""Every example runs in a process of its own, with the arguments of its first lines, and prints results."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

EXAMPLES = Path(__file__).parents[2] / "examples"

#: file: (arguments, what it must print)
CASES = {
    "demo_digits.py": (
        ["--epochs", "5"],
        [r"held-out digits: (0\.9[789]|1\.0)", "images per second", "digits.png", "5/5"],
    ),
    "strategies_overview.py": (
        [],
        [r"MirroredStrategy: accuracy 0\.\d+", r"CentralStorageStrategy: accuracy 0\.\d+"],
    ),
    "mirrored_variables.py": (
        [],
        [
            r"MirroredVariable:\{\n  0: <unisono.Variable .* numpy=1.0>,\n  1: <",
            r"(Result: 44.0\n){3}",
            "Resolver: None",
        ],
    ),
    "mirrored_fit.py": ([], ["Number of devices: 2", r"Evaluation accuracy: 0\.9[6789]"]),
    "transfer_learning.py": ([], ["The base is as it was", r"fine-tuning: 0\.[89]"]),
    "seeds_and_precision.py": (
        [],
        ["one seed are equal: True", "LossScaleOptimizer", r"Too late! .*dense.*kernel", "TPU devices: 2"],
    ),
    # On the virtual devices of the tests, all of which compute.
    "parameter_server_fit.py": ([], ["Batch size: 64", "Steps: 192", r"Evaluation accuracy: 0\.9[678]"]),
    "parameter_server_custom_loop.py": (
        [],
        [r"(Finished epoch \d, accuracy is \d\.\d+\.\n){4}", "Final loss is 0", "Evaluation accuracy: 1.0"],
    ),
    "estimator.py": (
        ["--steps", "100"],
        [r"step 100: accuracy (0\.9|1\.0)", "first picture shows", "exported model agrees: True"],
    ),
    "estimator_wide_and_deep.py": (
        ["--steps", "300"],
        [r"^accuracy: 0\.7[3-9]", "global_step: 300", r"Person 2 earns [<>]=?50K", "Weights of"],
    ),
    "lora.py": (
        [],
        ["weights that learn: 4613 of", r"0\.[0-3]\d before, 0\.9\d after", "kernels are as they were: True"],
    ),
    "pure_jax.py": ([], [r"Optax: loss 0\.0", r"Flax NNX: loss 0\.0"]),
}  # fmt: skip


#: The same, of those that need another package, or more time.
COSTLY = {
    "character_transformer.py": (
        None,
        ["--epochs", "1", "--length", "32"],
        [r"loss of unseen text: (1\.\d+|2\.[0-4]\d), by frequency 2\.9", "sample: "],
    ),
    "gan_loop.py": (
        None,
        [],
        [r"before: 0\.[4-9]", r"step 600: discriminator \d", r"after: 0\.[01]"],
    ),
    "hugging_face_data.py": (
        "datasets",
        ["--epochs", "4"],
        [r"num_rows: 1500", r"val_accuracy: 0\.[89]", r"digit 0: [23]\d of 33 are right"],
    ),
    "keras_tuner_search.py": (
        "keras_tuner",
        ["--trials", "2", "--epochs", "2"],
        [r"trials: 2, best accuracy 0\.\d+ with \{'width': \d+", r"best model, loaded: 0\.\d+"],
    ),
    "torch_loader.py": (
        "torch",
        ["--epochs", "4"],
        [
            r"24/24 .*val_accuracy: 0\.[78]",
            r"epoch 2 of the loop: loss 0\.\d+",
            r"Evaluation accuracy: 0\.[89]",
        ],
    ),
    "optuna_search.py": (
        "optuna",
        ["--trials", "2", "--epochs", "2"],
        [r"trials: 2, best accuracy 0\.\d+ with"],
    ),
}


def run(name, arguments, folder):
    done = forked.run([str(EXAMPLES / name), *arguments], folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def test_unisono_is_imported_before_keras_which_then_runs_on_jax(tmp_path):
    """In programs as they are started; those below come from a process that has imported both."""
    for path in EXAMPLES.glob("[!_]*.py"):
        imports = re.findall(r"^(?:import|from) (unisono|keras)\b", path.read_text(), re.MULTILINE)
        assert imports[0] == "unisono", path.name
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "mirrored_variables.py")],
        cwd=tmp_path, env=forked.environment(), capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Resolver: None" in done.stdout


#: `make test` runs these; of what the others use there are tests of its own.
FEW = {"demo_digits.py", "mirrored_fit.py", "parameter_server_fit.py", "pure_jax.py"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW else pytest.mark.exhaustive) for name in CASES]
)
def test_example(name, tmp_path):
    arguments, expected = CASES[name]
    output = run(name, arguments, tmp_path)
    for pattern in expected:
        assert re.search(pattern, output), f"{pattern!r} is not in:\n{output[-4000:]}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", COSTLY)
def test_costly_example(name, tmp_path):
    package, arguments, expected = COSTLY[name]
    if package is not None:
        pytest.importorskip(package, reason=f"needs the package {package}")
    output = run(name, arguments, tmp_path)
    for pattern in expected:
        assert re.search(pattern, output), f"{pattern!r} is not in:\n{output[-4000:]}"


#: Those whose time was not measured yet.
UNMEASURED = {
    "demo_digits.py", "estimator.py", "estimator_wide_and_deep.py", "multi_worker_custom_loop.py",
    "multi_worker_evaluator.py", "multi_worker_keras.py", "parameter_server_custom_loop.py",
    "parameter_server_fit.py", "ray_tune.py", "strategies_overview.py", "wide_and_deep.py",
}  # fmt: skip


def test_examples_say_what_they_need_and_how_long_they_take():
    time = r"; (\d+ s|(half )?a minute|two minutes) on two cores"
    for path in EXAMPLES.glob("[!_]*.py"):
        head = path.read_text().partition('"""')[2].partition('"""')[0]
        pattern = r"^Needs .*" + time * (path.name not in UNMEASURED) + r"\."
        assert re.search(pattern, head, re.MULTILINE), path.name


def test_the_custom_loop_prints_the_losses_of_one_device(tmp_path):
    both = (["--epochs", "2"], ["--epochs", "2", "--one-device"])
    outputs = [run("custom_training_loop.py", arguments, tmp_path) for arguments in both]
    lines = [re.findall(r"Epoch.*", output) for output in outputs]
    assert len(lines[0]) == 4
    assert lines[0] == lines[1]


def test_the_tutorials_model_gives_the_same_numbers_without_and_with_the_scope(tmp_path):
    output = run("callbacks_and_checkpoints.py", ["--epochs", "8"], tmp_path)
    for text in ("Number of devices: 2", "Examples: 1500 297", "for epoch 4 is 9.99", "for epoch 8 is 9.99"):
        assert text in output
    weights = [f"ckpt_{epoch:02d}.weights.h5" for epoch in range(1, 9)]
    assert sorted(p.name for p in (tmp_path / "training_checkpoints").iterdir()) == weights
    assert list((tmp_path / "logs" / "train").glob("events.out.tfevents.*"))
    found = re.findall(r"Eval loss: (\S+), Eval Accuracy: (\S+)", output)
    (loss, accuracy), *others = [tuple(map(float, pair)) for pair in found]
    assert accuracy > 0.7
    # One device sums rows in another order than two.
    assert others == [(pytest.approx(loss, rel=1e-5), pytest.approx(accuracy, rel=1e-6))] * 2


def test_every_example_is_run():
    own_tests = {"callbacks_and_checkpoints.py", "custom_training_loop.py"}
    # In tests/cluster/test_examples.py.
    own_tests |= {"multi_worker_keras.py", "multi_worker_custom_loop.py", "wide_and_deep.py"}
    # In tests/cluster/test_evaluator.py.
    own_tests |= {"multi_worker_evaluator.py"}
    # Needs a cluster of Ray; tests/cluster/test_ray_cluster.py runs what it calls.
    own_tests |= {"ray_tune.py"}
    assert set(CASES) | set(COSTLY) | own_tests == {p.name for p in EXAMPLES.glob("[!_]*.py")}
