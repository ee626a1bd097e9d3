"""Callbacks that extend `fit`."""

import importlib.machinery
import importlib.util
import subprocess
import sys

import keras
import numpy as np
import pytest

import unisono
from unisono.callbacks import BackupAndRestore


def test_an_extension_whose_context_fit_did_not_enter_says_so(tmp_path):
    with pytest.raises(ValueError, match="must be a callback of `fit`"):
        BackupAndRestore(tmp_path).on_train_begin()


@pytest.mark.parametrize("imports", ["import unisono, keras", "import keras, unisono"])
def test_the_first_extension_of_a_program_may_be_looked_up_inside_the_call(imports, tmp_path):
    """Python has looked up `fit` before it evaluates the arguments, and Keras is wrapped in between."""
    program = f"""
{imports}, numpy as np
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
rows = np.ones((4, 2)), np.ones(4)
backup = "backup"
model.fit(*rows, callbacks=[unisono.callbacks.BackupAndRestore(backup, delete_checkpoint=False)])
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert any((tmp_path / "backup").iterdir())


@pytest.mark.parametrize("spec", [None, importlib.machinery.ModuleSpec("tensorflow", None)])
def test_tensorboard_of_keras_without_tensorflow_names_ours(monkeypatch, spec):
    with unisono.OneDeviceStrategy("cpu:0").scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    find = importlib.util.find_spec

    def without(name, *args):
        return spec if name == "tensorflow" else find(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(unisono.MissingPackageError, match=r"Write: `unisono.callbacks.TensorBoard"):
        model.fit(np.ones((2, 1)), np.ones((2, 1)), callbacks=[keras.callbacks.TensorBoard()], verbose=0)
