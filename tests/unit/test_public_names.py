"""`import unisono` is a lazy map of the public names."""

import subprocess
import sys

import pytest

import unisono


def test_the_map_is_all():
    assert set(unisono.__all__) <= set(dir(unisono))
    for name in unisono.__all__:
        if name != "__version__":
            assert getattr(unisono, name) is not None, name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="MirorredStrategy"):
        unisono.MirorredStrategy  # noqa: B018


def test_import_starts_neither_jax_nor_keras():
    code = (
        "import sys, os; os.environ.pop('KERAS_BACKEND', None); import unisono\n"
        "assert not {'jax', 'keras', 'grain', 'numpy'} & set(sys.modules)\n"
        "assert os.environ['KERAS_BACKEND'] == 'jax'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_another_backend_is_an_error():
    code = (
        "import sys, types; k = types.ModuleType('keras'); k.config = types.SimpleNamespace(\n"
        "  backend=lambda: 'torch'); sys.modules['keras'] = k; import unisono._backend as b\n"
        "b.require_jax()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert "Received: keras.config.backend()='torch'" in done.stderr
