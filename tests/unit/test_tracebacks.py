"""What a user sees of an error that the library raises on purpose."""

import inspect
import os
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unisono
from unisono import _errors, _tracebacks, tf

ERRORS = [c for _, c in inspect.getmembers(_errors, inspect.isclass) if issubclass(c, _errors.UnisonoError)]


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_are_named_as_programs_write_them(kind):
    assert getattr(unisono, kind.__name__) is kind
    assert repr(kind) == f"<class 'unisono.{kind.__name__}'>"
    assert type(pickle.loads(pickle.dumps(kind("text")))) is kind


def test_a_users_own_error_stays_in_its_module():
    class OwnError(unisono.UnisonoError):
        pass

    assert OwnError.__module__ == __name__


def a_mistake():
    unisono.ReduceOp.parse("max")


def shown(capsys, raises):
    """What Python prints at the end of a program that `raises`."""
    try:
        raises()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
    return capsys.readouterr().err


def test_only_frames_of_the_user_are_shown(capsys, monkeypatch):
    monkeypatch.delenv("UNISONO_TRACEBACK", raising=False)
    text = shown(capsys, a_mistake)
    assert 'unisono.ReduceOp.parse("max")' in text
    assert "unisono.InvalidArgumentError: `reduce_op` must be" in text
    assert "_values.py" not in text
    assert "UNISONO_TRACEBACK=full" in text


def test_all_frames_are_shown_on_demand(capsys, monkeypatch):
    monkeypatch.setenv("UNISONO_TRACEBACK", "full")
    text = shown(capsys, a_mistake)
    assert "_values.py" in text
    assert "UNISONO_TRACEBACK" not in text


def test_the_users_functions_between_are_kept(capsys, monkeypatch):
    monkeypatch.delenv("UNISONO_TRACEBACK", raising=False)
    strategy = unisono.OneDeviceStrategy("cpu:0")

    def step():
        a_mistake()

    text = shown(capsys, lambda: strategy.run(step))
    assert "strategy.run(step)" in text
    assert "a_mistake()" in text
    assert "_compiler.py" not in text
    assert "jax" not in text.replace("jax.", "")


def test_other_errors_are_shown_whole(capsys):
    text = shown(capsys, lambda: unisono.Variable("not a number"))
    assert "_variable.py" in text
    assert "UNISONO_TRACEBACK" not in text


def test_an_error_of_the_users_step_shows_no_frames_between(capsys, monkeypatch):
    monkeypatch.delenv("UNISONO_TRACEBACK", raising=False)
    strategy = unisono.OneDeviceStrategy("cpu:0")

    def step():
        raise KeyError("of the user")

    text = shown(capsys, lambda: strategy.run(step))
    assert "strategy.run(step)" in text
    assert 'raise KeyError("of the user")' in text
    assert "_compiler.py" not in text
    assert "UNISONO_TRACEBACK=full" in text


def test_an_error_without_frames_of_the_user_keeps_its_own():
    error = unisono.ContextError("text")
    _tracebacks.shorten(error)
    assert error.__traceback__ is None


def test_an_array_without_numpy_is_explained_where_it_ends_the_program(capsys):
    def raises():
        # Not by `.numpy()`: where another test has imported `unisono.tf`, arrays have it.
        raise AttributeError("'ArrayImpl' object has no attribute 'numpy'", name="numpy", obj=jnp.ones(()))

    text = shown(capsys, raises)
    assert "arrays that `from unisono import tf` makes have `numpy()`." in text


def test_a_value_kept_from_a_step_is_explained_where_it_ends_the_program(capsys):
    kept = []
    unisono.OneDeviceStrategy("cpu:0").run(lambda: kept.append(jnp.ones(()) + 1))
    text = shown(capsys, lambda: float(kept[0]))
    assert "Write `return value` in the step" in text
    # Frames of JAX would stand between the user's line and the advice.
    assert "jax/_src" not in text


def test_advice_stands_above_the_notes_of_others(capsys):
    error = ValueError("text")
    error.add_note("of another library")
    _tracebacks.add_advice(error, "Write x.")
    assert error.__notes__ == ["Write x.", "of another library"]


def test_a_backend_that_is_not_installed_is_explained_without_keras_frames(tmp_path):
    program = tmp_path / "train.py"
    program.write_text("import unisono\nimport keras\n")
    # As where TensorFlow and torch are not installed.
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No torch', name='torch')\n")
    done = subprocess.run(
        [sys.executable, program], env={**os.environ, "KERAS_BACKEND": "torch"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert "Set KERAS_BACKEND=jax in the environment, or leave it out." in done.stderr
    assert os.path.join("keras", "src") not in done.stderr


def test_fit_without_targets_is_explained_where_it_ends_the_program(capsys):
    import keras

    with unisono.OneDeviceStrategy("cpu:0").scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["accuracy"])
    text = shown(capsys, lambda: model.fit(np.ones((4, 2)), verbose=0))
    assert "Write `model.fit(x, y)`" in text
    assert os.path.join("keras", "src") not in text


def test_gradients_and_variables_in_the_wrong_order_are_explained(capsys):
    import keras

    strategy = unisono.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        optimizer, weight = keras.optimizers.SGD(), unisono.Variable(1.0)

    def step():
        optimizer.apply_gradients([(weight, jnp.ones(()) * weight)])

    text = shown(capsys, lambda: strategy.run(step))
    assert "Write `apply_gradients(zip(gradients, variables))` in this order" in text


def test_python_suggests_no_second_name(capsys):
    text = shown(capsys, lambda: unisono.MirroredStrategi)
    (line,) = [line for line in text.splitlines() if line.startswith("AttributeError: ")]
    assert line.endswith("has no attribute 'MirroredStrategi'. Did you mean `unisono.MirroredStrategy`?")
    assert "_names.py" not in text
    text = shown(capsys, lambda: tf.Session)
    (line,) = [line for line in text.splitlines() if line.startswith("AttributeError: ")]
    assert line.endswith("Write: a `tf.function` of arguments, called with arrays")


def test_no_replica_context_is_explained_where_it_ends_the_program(capsys):
    def raises():
        with unisono.OneDeviceStrategy("cpu:0").scope():
            unisono.get_replica_context().all_reduce("sum", 1.0)

    assert "Call `all_reduce` in the function that `strategy.run` is given." in shown(capsys, raises)


def test_run_within_jit_is_explained_where_it_ends_the_program(capsys):
    strategy = unisono.OneDeviceStrategy("cpu:0")

    def twice(b):
        return b * 2

    # Before the step has run, and after it: JAX says it then, when the program starts.
    text = shown(capsys, lambda: jax.jit(lambda a: strategy.run(twice, (a,)))(jnp.ones(3)))
    assert "Write `@unisono.function` in place of `@jax.jit`" in text
    strategy.run(twice, (jnp.ones(3),))
    text = shown(capsys, lambda: jax.jit(lambda a: strategy.run(twice, (a,)))(jnp.ones(3)))
    assert "Write `@unisono.function` in place of `@jax.jit`." in text


def test_a_warning_of_keras_below_a_wrapped_method_names_the_line_of_the_program(tmp_path):
    with unisono.OneDeviceStrategy("cpu:0").scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("adam")
        model.optimizer.build(model.trainable_variables)
        model.save_weights(tmp_path / "model.weights.h5")
        model.compile("sgd")
    with pytest.warns(UserWarning, match="Skipping variable loading") as caught:
        model.load_weights(tmp_path / "model.weights.h5")
    assert [warning.filename for warning in caught] == [__file__]
