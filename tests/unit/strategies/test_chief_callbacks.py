"""What callbacks of several workers may do while a step runs."""

import keras

from unisono.cluster.strategy._chief_callbacks import (
    DECISION_HOOKS,
    decision_hooks,
    shared_decisions,
)


class Model:
    """Stands for one that is being trained: its state belongs to the running step."""

    stop_training = True

    def jax_state_sync(self):
        raise RuntimeError("Array has been deleted")


class HearsOfBeginnings(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        pass


def test_the_end_of_a_batch_leaves_the_state_alone():
    """Keras may call it from another thread, beside the next step."""
    shared, model = shared_decisions(bytes, [HearsOfBeginnings()], DECISION_HOOKS), Model()
    shared.set_model(model)
    shared.on_train_batch_end(0)
    assert not model.stop_training


def test_nobody_hears_of_batches_where_no_callback_could_stop_there():
    """Keras would call another thread after each of them."""
    base = keras.callbacks.Callback
    quiet = shared_decisions(bytes, [keras.callbacks.EarlyStopping()], DECISION_HOOKS)
    assert quiet.on_train_batch_end.__func__ is base.on_train_batch_end
    # It stops at once, from logs that are equal on all workers.
    at_once = shared_decisions(bytes, [keras.callbacks.TerminateOnNaN()], DECISION_HOOKS)
    assert at_once.on_train_batch_end.__func__ is base.on_train_batch_end


def test_a_function_that_hears_of_batches_may_stop_there():
    """`LambdaCallback` has its hooks on the object, not in its class."""
    own = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    shared, model = shared_decisions(bytes, [own], DECISION_HOOKS), Model()
    shared.set_model(model)
    shared.on_train_batch_end(0)
    assert not model.stop_training


class SetsRate(keras.callbacks.EarlyStopping):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.1


def test_who_may_decide_before_the_first_step():
    assert decision_hooks([keras.callbacks.EarlyStopping(), keras.callbacks.CSVLogger("x")]) == set()
    assert decision_hooks([SetsRate()]) == {"on_epoch_begin"}
    assert decision_hooks([keras.callbacks.BackupAndRestore("x")]) == {"on_train_begin"}
    own = keras.callbacks.LambdaCallback(on_train_begin=print)
    assert "on_train_begin" in decision_hooks([own])
