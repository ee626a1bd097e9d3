"""Every example runs in a process of its own, as its first lines say, and prints what it should."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

#: file: (arguments, what it must print)
CASES = {
    "demo_digits.py": (
        [],
        [r"held-out digits: (0\.9[789]|1\.0)", "images per second", "digits.png", "20/20"],
    ),
    "seed_000_overview.py": (
        [],
        [r"MirroredStrategy: accuracy 0\.\d+", r"CentralStorageStrategy: accuracy 0\.\d+"],
    ),
    "seed_002_keras_tutorial.py": (
        ["--epochs", "8"],
        ["Number of devices: 2", "for epoch 4 is 9.99", "ckpt_08.weights.h5", "Without the scope"],
    ),
    "seed_003_mirrored_api.py": (
        [],
        [
            r"MirroredVariable:\{\n  0: <unisono.Variable .* numpy=1.0>,\n  1: <",
            r"(Result: 44.0\n){3}",
            "Resolver: None",
        ],
    ),
    "seed_004_mirrored.py": ([], ["Number of devices: 2", r"Evaluation accuracy: 0\.9[6789]"]),
    "seed_004_transfer_learning.py": ([], ["The base is as it was", r"fine-tuning: 0\.[89]"]),
    "seed_004_practices.py": (
        [],
        ["one seed are equal: True", "LossScaleOptimizer", r"Too late! .*dense.*kernel", "TPU devices: 2"],
    ),
    "pure_jax.py": ([], [r"Optax: loss 0\.0", r"Flax NNX: loss 0\.0"]),
}  # fmt: skip


def run(name, arguments, folder):
    env = {k: v for k, v in os.environ.items() if k not in ("PJRT_NPROC", "XLA_FLAGS", "KERAS_BACKEND")}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=folder, env=env, capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


@pytest.mark.parametrize("name", CASES)
def test_example(name, tmp_path):
    arguments, expected = CASES[name]
    output = run(name, arguments, tmp_path)
    for pattern in expected:
        assert re.search(pattern, output), f"{pattern!r} is not in:\n{output[-4000:]}"


def test_the_custom_loop_prints_the_losses_of_one_device(tmp_path):
    outputs = [run("seed_004_custom_loop.py", flags, tmp_path) for flags in ([], ["--one-device"])]
    lines = [re.findall(r"Epoch.*", output) for output in outputs]
    assert len(lines[0]) == 10
    assert lines[0] == lines[1]


def test_every_example_is_run():
    assert set(CASES) | {"seed_004_custom_loop.py"} == {p.name for p in EXAMPLES.glob("[!_]*.py")}
