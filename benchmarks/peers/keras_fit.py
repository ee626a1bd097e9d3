"""Keras' `fit`, `evaluate` and `predict`: Unisono, plain Keras, DataParallel, TensorFlow."""

import contextlib
import functools
import os
import time

from peers import Peer

#: `steps_per_execution` of actions such as "fit, 40 steps per execution".
TOGETHER = (10, 32, 40)
#: Rows of a batch of `evaluate` and `predict`, whatever the devices.
TEST_BATCH = 128
#: Calls of `evaluate` or `predict` in a turn: one is too short to be timed well.
TESTS = 3
#: Seconds until a peer must have chosen how its steps run.
SETTLE_LIMIT = 90


def start(place, who):
    who = {
        "unisono": unisono,
        "fully_sharded": fully_sharded,
        "plain": plain,
        "data_parallel": data_parallel,
        "tensorflow": tensorflow,
    }[who]
    return who(place)


def fully_sharded(place):
    return unisono(place, "fully_sharded")


def unisono(place, layout="mirrored"):
    import unisono

    if place.processes > 1:
        compressed = place.compress and unisono.CompressedAllReduce(place.compress)
        strategy = unisono.MultiWorkerMirroredStrategy(cross_device_ops=compressed, state_layout=layout)
    else:
        strategy = unisono.MirroredStrategy(place.names, state_layout=layout)
    return peer(place, strategy.scope, unisono.callbacks.BackupAndRestore, unisono.GradientTape)


def plain(place):
    os.environ["KERAS_BACKEND"] = "jax"
    return peer(place, contextlib.nullcontext)


def data_parallel(place):
    os.environ["KERAS_BACKEND"] = "jax"
    import jax

    jax.config.update("jax_num_cpu_devices", place.devices)
    import keras

    keras.distribution.set_distribution(keras.distribution.DataParallel())
    return peer(place, contextlib.nullcontext)


def tensorflow(place):
    os.environ["KERAS_BACKEND"] = "tensorflow"
    scope = tf_strategy(place.devices).scope
    import tensorflow as tf

    return peer(place, scope, tape=tf.GradientTape)


def tf_strategy(devices):
    """TensorFlow's MirroredStrategy over logical CPU devices."""
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * devices)
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(devices)])


def is_decided(model):
    """Whether all functions of a model have chosen whether their steps run in a loop of constant length."""
    for name in ("train_function", "test_function", "predict_function"):
        groups = getattr(getattr(getattr(model, name, None), "loop", None), "constant", None)
        for trial in groups._trials.values() if groups else ():
            if trial.phase.name not in ("TOGETHER", "ALONE"):
                return False
    return True


def with_own_step(model, tape):
    """A model of the same layers whose `train_step(self, data)` is written with a tape."""
    import keras

    class OwnStep(keras.Model):
        def train_step(self, data):
            x, y = data
            with tape() as recorded:
                y_pred = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=y_pred)
            weights = self.trainable_variables
            self.optimizer.apply_gradients(zip(recorded.gradient(loss, weights), weights, strict=True))
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, y_pred)
            return {metric.name: metric.result() for metric in self.metrics}

    return OwnStep(model.inputs, model.outputs)


def peer(place, scope, backup_callback=None, tape=None):
    """What is common to all: the model, and the actions on it."""
    import keras

    keras.config.set_dtype_policy(place.policy)

    class SeesBatches(keras.callbacks.Callback):
        """Does nothing, but wants every batch's beginning and end."""

        def on_train_batch_begin(self, batch, logs=None):
            pass

        def on_train_batch_end(self, batch, logs=None):
            pass

    x, y = place.data()
    batch, steps = place.batch, place.workload.steps

    def compiled(own_step=False, **arguments):
        with scope():
            model = place.workload.keras_model()
            if own_step:
                model = with_own_step(model, tape)
            model.compile("adam", place.workload.loss(), metrics=["accuracy"], **arguments)
        return model

    model = compiled()
    others = {}

    def fit(callbacks=(), size=batch, rows=None, net=model):
        net.fit(x[:rows], y[:rows], batch_size=size, epochs=1, verbose=0, callbacks=list(callbacks))

    def fit_with_backup():
        make = backup_callback or keras.callbacks.BackupAndRestore
        path = os.path.join(place.folder, "backup" if backup_callback else "backup.weights.h5")
        fit([make(path)])

    def fit_together(count):
        if count not in others:
            others[count] = compiled(steps_per_execution=count)
        fit(net=others[count])

    def fit_own_step():
        if "own step" not in others:
            others["own step"] = compiled(own_step=True)
        fit(net=others["own step"])

    def tested():
        """Rows for `evaluate` and `predict`: the same everywhere, in batches of 128."""
        if "tested" not in others:
            others["tested"] = place.workload.data(steps * TEST_BATCH)
        return others["tested"]

    def evaluate():
        for _ in range(TESTS):
            model.evaluate(*tested(), batch_size=TEST_BATCH, verbose=0)

    def predict():
        for _ in range(TESTS):
            model.predict(tested()[0], batch_size=TEST_BATCH, verbose=0)

    def settle(action):
        """Let Unisono measure whether steps run in a loop, whose programs it compiles beside the steps."""
        if place.platform != "gpu":
            return
        until = time.monotonic() + SETTLE_LIMIT
        actions[action][0]()
        while not is_decided(model):
            if time.monotonic() > until:
                raise TimeoutError(f"{action!r} must choose how steps run within {SETTLE_LIMIT} s")
            actions[action][0]()

    odd = batch - 1
    actions = {
        "fit": (fit, len(x)),
        "fit, callback": (lambda: fit([SeesBatches()]), len(x)),
        "fit, backup": (fit_with_backup, len(x)),
        "fit, odd batch": (lambda: fit(size=odd, rows=steps * odd), steps * odd),
        **{
            f"fit, {count} steps per execution": (functools.partial(fit_together, count), len(x))
            for count in TOGETHER
        },
        "fit, own step": (fit_own_step, len(x)),
        "evaluate, same batch": (lambda: model.evaluate(x, y, batch_size=batch, verbose=0), len(x)),
        "evaluate": (evaluate, TESTS * steps * TEST_BATCH),
        "predict": (predict, TESTS * steps * TEST_BATCH),
    }
    return Peer(
        first=lambda: fit(rows=batch),
        actions=actions,
        settle=settle,
        steps=lambda: int(model.optimizer.iterations.numpy()),
        training=dict.fromkeys(["fit", "fit, callback", "fit, backup", "fit, odd batch"], steps),
    )
