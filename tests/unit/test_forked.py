"""A forked program has the variables that JAX reads at its import, as one that starts cold has them."""

import json

import pytest
from tests import forked

SHOWN = """
import json, os, jax
os.environ["JAX_ENABLE_X64"] = "1"
names = ("jax_platforms", "jax_num_cpu_devices", "jax_compilation_cache_dir", "jax_enable_x64")
print(json.dumps([getattr(jax.config, name) for name in names]))
"""


def shown(folder, **variables):
    """The settings of JAX in a forked program with some variables."""
    (folder / "shown.py").write_text(SHOWN)
    done = forked.run(["shown.py"], folder, env=forked.environment(**variables))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_jax_follows_the_variables_of_a_program(tmp_path):
    """The next program has none of them: they are settings of the child alone."""
    given = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "3", "JAX_COMPILATION_CACHE_DIR": "/cache"}
    assert shown(tmp_path, **given) == ["cpu", 3, "/cache", True]
    assert shown(tmp_path) == [None, -1, None, True]


def test_a_program_without_a_platform_of_its_variable_ends(tmp_path):
    """It does not compute on another one, as it would with the settings of the process that forks."""
    (tmp_path / "devices.py").write_text("import jax; print(jax.devices())")
    done = forked.run(["devices.py"], tmp_path, env=forked.environment(JAX_PLATFORMS="other"))
    assert done.returncode == 1
    assert "other" in done.stderr


def test_a_variable_that_keras_has_read_is_an_error(tmp_path):
    with pytest.raises(AssertionError, match="Keras has read KERAS_BACKEND already"):
        forked.run(["train.py"], tmp_path, env=forked.environment(KERAS_BACKEND="torch"))
