"""What callbacks of several workers may do while a step runs."""

import keras

from unisono.training._callbacks import SharedDecisions


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
    shared, model = SharedDecisions(bytes, [HearsOfBeginnings()]), Model()
    shared.set_model(model)
    shared.on_train_batch_end(0)
    assert not model.stop_training
