"""Clear errors at the earliest moment, and a failure that never costs the weights."""

import jax
import keras
import numpy as np
import pytest

import unisono
from tests.virtual.training._digits import crossentropy, digits, mirrored, mlp

L = keras.layers


def compiled(strategy, **changes):
    with strategy.scope():
        model = mlp()
        model.compile(**{"optimizer": "adam", "loss": crossentropy(), "metrics": ["accuracy"], **changes})
    return model


def small(rows=100):
    x, y = digits()
    return x[:rows], y[:rows]


def test_too_late():
    model = mlp()
    with mirrored(2).scope(), pytest.raises(unisono.ScopeError, match=r"'sequential\w*/dense\w*/kernel'"):
        model.compile("adam", "mse")


def test_variables_that_are_added_to_a_model_belong_in_the_scope_too():
    strategy = mirrored(2)
    model = compiled(strategy)
    model.layers[0].enable_lora(2)
    written = r"lora_kernel_a.* created outside .* in which others.*\n +layer\.enable_lora\(4\)\n +model"
    with strategy.scope(), pytest.raises(unisono.ScopeError, match=f"(?s){written}"):
        model.compile("adam", crossentropy())


def test_fit_in_a_scope_with_a_model_of_none():
    model = mlp()
    model.compile("adam", crossentropy())
    with mirrored(2).scope(), pytest.raises(ValueError, match="compiled in it"):
        model.fit(*small(), verbose=0)


def test_train_on_batch_inside_of_run():
    strategy = mirrored(2)
    model = compiled(strategy)
    with pytest.raises(unisono.ContextError, match=r"`train_on_batch` divides rows.* outside"):
        strategy.run(model.train_on_batch, args=small(4))


def test_a_model_remembers_the_scope_it_was_made_in():
    with mirrored(2).scope():
        model = mlp()
    model.compile("adam", crossentropy())
    model.fit(*small(), verbose=0)
    assert isinstance(model.train_function, unisono.training.trainer._trainer_function.TrainerFunction)


def test_unequal_rows():
    model = compiled(mirrored(2))

    def batches():
        yield np.zeros((4, 64), "f4"), np.zeros(3, "i4")

    model.fit(*small(), verbose=0)
    with pytest.raises(ValueError, match=r"at batch\[0\], and \(3,\) at batch\[1\]"):
        model.fit(batches(), verbose=0, shuffle=False)


class Fails(keras.callbacks.Callback):
    """Raises in one hook."""

    def __init__(self, hook):
        super().__init__()
        setattr(self, hook, self.fail)

    def fail(self, *args, **kwargs):
        raise ZeroDivisionError


def assert_usable(model, before=None):
    for variable in model.variables + model.optimizer.variables:
        assert variable._value is not None
        assert not variable._value.is_deleted()
    if before is not None:
        for a, b in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(a, b)
    model.fit(*small(), verbose=0)


@pytest.mark.parametrize("hook", ["on_train_batch_begin", "on_train_batch_end", "on_epoch_end"])
def test_a_callback_that_raises_in_fit(hook):
    model = compiled(mirrored(2))
    with pytest.raises(ZeroDivisionError):
        model.fit(*small(), verbose=0, callbacks=[Fails(hook)])
    assert_usable(model)


@pytest.mark.parametrize(
    ("method", "hook"), [("evaluate", "on_test_batch_end"), ("predict", "on_predict_batch_end")]
)
def test_a_callback_that_raises_elsewhere(method, hook):
    model = compiled(mirrored(2))
    model.fit(*small(), verbose=0)
    before = model.get_weights()
    data = small() if method == "evaluate" else small()[:1]
    with pytest.raises(ZeroDivisionError):
        getattr(model, method)(*data, verbose=0, callbacks=[Fails(hook)])
    assert_usable(model, before)


@pytest.mark.parametrize("good", [0, 2])
def test_a_bad_batch(good):
    """In the very first step of a `fit`, and later."""
    model = compiled(mirrored(2))
    x, y = small(8)

    def batches():
        for _ in range(good):
            yield x, y
        yield x[:, :60], y

    before = model.get_weights()
    with pytest.raises(ValueError, match=r"incompatible|shape|dot_general"):
        model.fit(batches(), verbose=0, shuffle=False)
    assert_usable(model, before if good == 0 else None)


def test_the_nan_guard():
    jax.config.update("jax_debug_nans", True)
    try:
        model = compiled(mirrored(2))
        x, y = small(8)
        before = model.get_weights()
        with pytest.raises(FloatingPointError):
            model.fit(x * np.nan, y, verbose=0)
    finally:
        jax.config.update("jax_debug_nans", False)
    assert_usable(model, before)


def test_a_model_of_no_strategy_in_a_callback():
    """As a metric that a second model computes: `fit` has entered the scope, and not the user."""
    x, y = digits()
    other = mlp()
    other.compile("sgd", crossentropy())
    expected = other.evaluate(x[:50], y[:50], verbose=0)
    found = []

    class Uses(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            found.append(other.evaluate(x[:50], y[:50], verbose=0))
            found.append(other.predict(x[:3], verbose=0).shape)
            other.fit(x[:50], y[:50], verbose=0)

    strategy = mirrored(2)
    with strategy.scope():
        model = mlp()
        model.compile("sgd", crossentropy())
    model.fit(x[:64], y[:64], verbose=0, callbacks=[Uses()])
    assert found == [pytest.approx(expected), (3, 10)]
    with strategy.scope(), pytest.raises(unisono.InvalidArgumentError, match="compiled in it"):
        other.evaluate(x[:50], y[:50], verbose=0)
