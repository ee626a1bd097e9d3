"""What the library uses of Keras that is not public, on the Keras that is installed."""

import contextlib
import types

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unisono
from unisono._system._signatures import names_in
from unisono.step import _keras_internals as internals
from unisono.training._model_calls import _single_batches


@pytest.fixture
def model():
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2, name="last")])
    model.compile("sgd", keras.losses.Huber(delta=2.0), metrics=["mae"])
    return model


def test_an_optimizer_applies_as_keras_where_it_overrides_neither_way():
    class OwnApply(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            super().apply(grads, trainable_variables)

    class OwnUpdate(keras.optimizers.SGD):
        def _backend_apply_gradients(self, grads, trainable_variables):
            super()._backend_apply_gradients(grads, trainable_variables)

    optimizers = (keras.optimizers.Adam(), OwnApply(), OwnUpdate())
    assert [internals.applies_as_keras(optimizer) for optimizer in optimizers] == [True, False, False]


def test_the_installed_keras_has_every_name():
    internals.check_keras()


def test_a_keras_without_a_name_is_named_with_it(monkeypatch):
    entries = ("_flatten_layers(include_self)", "_flatten_layers(deep)", "_no_such_name")
    monkeypatch.setitem(internals.RELIED_ON, "Layer", entries)
    with pytest.raises(unisono.BackendError, match=r"Layer\._no_such_name.*Received: Keras 3\.") as raised:
        internals.check_keras()
    assert "Layer._flatten_layers(deep)" in str(raised.value)
    assert "include_self" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "wrapper", "fits"),
    [
        ("add_loss", lambda original, self, loss: None, True),
        ("add_loss", lambda original, self, loss, earlier=None: None, True),
        ("add_loss", lambda original, self, *args, **kwargs: None, True),
        ("add_loss", lambda original, self, losses: None, False),
        ("add_loss", lambda original, self: None, False),
        ("losses", lambda original, self: None, True),
        ("__new__", lambda original, cls, *args, **kwargs: None, True),
        ("no_such_method", lambda original, self, *args: None, False),
    ],
)
def test_wraps_have_the_parameters_of_what_they_wrap(name, wrapper, fits):
    error = pytest.raises(unisono.BackendError, match=f"Layer.{name}")
    with contextlib.nullcontext() if fits else error:
        internals.check_wraps([(keras.Layer, name, wrapper)])


def test_names_are_found_in_bases_wrapped_methods_and_properties():
    class Base:
        def __init__(self):
            self.inherited = 1

    class Own(Base):
        @property
        def size(self):
            return self.measured

        @staticmethod
        def make(given):
            return [2 * hidden for hidden in given]

    found = names_in(Own) | names_in(Base)
    assert {"inherited", "measured", "given", "hidden"} <= found
    assert "absent" not in found


def test_variables_are_read_and_written_past_scopes_and_casts():
    variable = keras.Variable([1.0, 2.0], dtype="float32")
    with keras.StatelessScope([(variable, jnp.zeros(2))]):
        np.testing.assert_array_equal(internals.stored_value(variable), [1, 2])
    internals.store_value(variable, jnp.asarray([3.0, 4.0]))
    np.testing.assert_array_equal(variable.value, [3, 4])
    half = keras.layers.Dense(1, dtype="mixed_float16")
    half.build((None, 1))
    assert internals.stored_dtype(half.kernel) == "float32"


def test_a_deferred_variable_takes_another_first_value():
    with keras.StatelessScope():
        variable = keras.Variable(keras.initializers.Zeros(), shape=(2,))
        assert internals.stored_value(variable) is None
        internals.initialize_with(variable, lambda shape, dtype: jnp.full(shape, 7, dtype))
    np.testing.assert_array_equal(variable.value, [7, 7])


def test_layers(model):
    assert [layer.name for layer in internals.all_layers(model, include_self=False)][-1] == "last"
    assert isinstance(internals.layers_with_input(model)[0], keras.layers.InputLayer)
    assert internals.takes_training(keras.layers.Dropout(0.5))
    assert not internals.takes_training(keras.layers.Flatten())
    normalization = keras.layers.BatchNormalization()
    normalization.build((None, 4, 3))
    assert internals.reduced_axes(normalization) == [0, 1]


def test_losses_of_layers():
    layer = keras.layers.ActivityRegularization(l2=1.0)
    model = keras.Sequential([keras.layers.Input((3,)), layer])
    with keras.StatelessScope(collect_losses=True):
        layer.add_loss(jnp.ones(()))
        internals.replace_losses(model, [jnp.full((), 5.0)])
        assert model.losses == internals.replaced_losses(model) == [5.0]
    internals.replace_losses(model, [])


def test_what_compile_was_given(model):
    assert internals.compile_arguments(model)["loss"] is model.loss
    assert internals.compile_arguments(keras.Sequential()) == {"loss": None}
    assert internals.compiled_metrics(model) == []
    model.fit(np.ones((2, 3)), np.ones((2, 2)), verbose=0)
    assert [m.name for m in internals.compiled_metrics(model)] == ["mae"]
    assert internals.function_arguments(model.loss)["delta"] == 2
    assert internals.function_arguments(keras.metrics.Mean()) == {}
    x, y = np.ones((2, 3), "float32"), np.zeros((2, 2), "float32")
    predicted = model(x)
    assert internals.loss_of_step(model, x, y, predicted, None, training=True) == model.loss(y, predicted)


def test_optimizers(model):
    assert internals.trained_variables(model.optimizer) == []
    model.optimizer.build(model.trainable_variables)
    assert [v.name for v in internals.trained_variables(model.optimizer)] == ["kernel", "bias"]
    assert isinstance(internals.held_rate(model.optimizer), keras.Variable)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    assert internals.held_rate(keras.optimizers.SGD(schedule)) is schedule
    assert internals.held_rate(None) is None


def test_the_state_in_keras_loop(model):
    seen = {}

    class Watch(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            seen["epoch"] = internals.restored_epoch(self.model)
            internals.set_restored_epoch(self.model, 1)

        def on_train_batch_end(self, batch, logs=None):
            # Not `self.model`, with which Keras moves the state to the variables.
            seen["state"] = set(internals.training_state(model))
            seen["value"] = internals.stored_value(model.layers[0].kernel)

    watch = Watch()
    assert not internals.has_had_model(watch)
    history = model.fit(np.ones((2, 3)), np.ones((2, 2)), epochs=3, verbose=0, callbacks=[watch])
    lists = {"trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables"}
    assert seen == {"epoch": None, "state": lists, "value": None}
    assert len(history.epoch) == 2
    assert internals.training_state(model) is None
    assert internals.has_had_model(watch)
    assert vars(watch).keys() >= internals.CALLBACK_ATTRIBUTES - {"model"}


def test_a_state_is_put_back_where_keras_reads_it(model):
    kernel, bias = np.ones((3, 2), "float32"), np.ones(2, "float32")
    lists = {"trainable_variables": [kernel, bias]}
    internals.empty_variables(model, {"trainable_variables": True})
    assert internals.stored_value(model.layers[0].kernel) is None
    internals.set_training_state(model, lists)
    internals.mark_synced(model, False)
    model.jax_state_sync()
    np.testing.assert_array_equal(model.layers[0].kernel.value, kernel)
    internals.set_training_state(model, None)


def test_validation_of_fit_is_told_from_a_users_evaluate(model):
    asked, own = [], model.evaluate

    def evaluate(*args, **kwargs):
        asked.append(internals.is_validation(kwargs))
        return own(*args, **kwargs)

    model.evaluate = evaluate
    x, y = np.ones((2, 3)), np.ones((2, 2))
    model.fit(x, y, validation_data=(x, y), verbose=0)
    model.evaluate(x, y, verbose=0)
    assert asked == [True, False]


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_data_without_a_batch(model):
    class NoBatches(keras.utils.PyDataset):
        def __len__(self):
            return 0

        def __getitem__(self, index):
            raise IndexError

    with pytest.raises(UnboundLocalError) as raised:
        model.predict(NoBatches(), verbose=0)
    assert internals.is_of_no_batch(raised.value)
    assert not internals.is_of_no_batch(UnboundLocalError("local variable 'x'"))


@pytest.mark.parametrize("stacks", [False, True])
def test_a_strategy_takes_single_batches_where_keras_stacks_them(stacks):
    """As https://github.com/keras-team/keras/pull/23527 does with those of `steps_per_execution`."""

    class Adapter:
        def get_jax_iterator(self):
            return iter(["single"])

    class Stacking(Adapter):
        def get_jax_iterator(self, super_batch=None):
            return iter(["stacked" if super_batch else "single"])

    epoch = types.SimpleNamespace(data_adapter=Stacking() if stacks else Adapter())
    with unisono.MirroredStrategy(["cpu:0"]).scope():
        assert list(_single_batches(lambda self: iter(["of Keras"]), epoch)) == [
            "single" if stacks else "of Keras"
        ]
    assert list(_single_batches(lambda self: iter(["of Keras"]), epoch)) == ["of Keras"]
