"""`import keras` above `import unisono`: Keras runs on JAX where nothing else is chosen or installed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
#: A Keras of one line, which shows what the real one would read.
KERAS = "import os; chosen = os.environ.get('KERAS_BACKEND')"


@pytest.fixture
def site(tmp_path):
    """A folder of packages, as it is after an installation."""
    for name in ("unisono_keras.pth", "_unisono_keras.py"):
        (tmp_path / name).symlink_to(SRC / name)
    (tmp_path / "keras.py").write_text(KERAS)
    (tmp_path / "home").mkdir()
    return tmp_path


def chosen(site, code="import keras; print(keras.chosen)", **environ):
    environ = {"KERAS_HOME": str(site / "home"), "PATH": "/usr/bin:/bin"} | environ
    start = f"import site; site.addsitedir({str(site)!r}); "
    # Without the packages of this environment, TensorFlow among them.
    command = [sys.executable, "-S", "-c", start + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_jax_is_chosen_where_nothing_is(site):
    assert chosen(site) == "jax"
    assert list((site / "home").iterdir()) == [], "keras.json is Keras' own"


def test_what_keras_writes_by_itself_is_no_choice(site):
    (site / "home" / "keras.json").write_text(json.dumps({"backend": "tensorflow"}))
    assert chosen(site) == "jax"


@pytest.mark.parametrize("text", ['{"backend": "torch"}', '{"backend": "jax"}'])
def test_a_backend_in_keras_json_stays(site, text):
    (site / "home" / "keras.json").write_text(text)
    assert chosen(site) == "None"
    assert (site / "home" / "keras.json").read_text() == text


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_damaged_keras_json_is_one_without_a_choice(site, text):
    (site / "home" / "keras.json").write_text(text)
    assert chosen(site) == "jax"


def test_a_backend_in_the_environment_stays(site):
    assert chosen(site, KERAS_BACKEND="torch") == "torch"


def test_an_installed_tensorflow_stays(site):
    (site / "tensorflow.py").write_text("")
    assert chosen(site) == "None"


def test_a_start_without_keras_imports_one_small_module(site):
    before = f"import sys, site; before = set(sys.modules); site.addsitedir({str(site)!r}); "
    command = [sys.executable, "-S", "-c", before + "print(sorted(set(sys.modules) - before))"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "['_unisono_keras']"
