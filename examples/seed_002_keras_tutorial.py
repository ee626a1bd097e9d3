"""The Keras tutorial of tf.distribute: callbacks, checkpoints, reload without the scope.

    python examples/seed_002_keras_tutorial.py [--mnist] [--epochs 10]

Left out until they are there: the TensorBoard callback and the SavedModel export.
"""

import argparse
import os
import tempfile

import unisono  # before Keras, so that it runs on JAX
import keras

from _digits import devices, load

options = argparse.ArgumentParser()
options.add_argument("--mnist", action="store_true")
options.add_argument("--epochs", type=int, default=10)
options = options.parse_args()

(x_train, y_train), (x_test, y_test) = load(options.mnist)  # changed: tfds.load downloads

strategy = unisono.MirroredStrategy(devices())
print("Number of devices: {}".format(strategy.num_replicas_in_sync))

BUFFER_SIZE = 10000
BATCH_SIZE_PER_REPLICA = 64
BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync


def scale(image, label):
    image = image.astype("float32")  # changed: pipelines run on NumPy, not on TensorFlow
    image /= 255
    return image[..., None], label


mnist_train = unisono.data.Dataset.from_tensor_slices((x_train, y_train))
mnist_test = unisono.data.Dataset.from_tensor_slices((x_test, y_test))
train_dataset = mnist_train.map(scale).shuffle(BUFFER_SIZE).batch(BATCH_SIZE)
eval_dataset = mnist_test.map(scale).batch(BATCH_SIZE)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((*x_train.shape[1:], 1)),  # changed: Keras 3 wants an Input
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        loss="sparse_categorical_crossentropy", optimizer=keras.optimizers.Adam(), metrics=["accuracy"]
    )

checkpoint_dir = os.path.join(tempfile.mkdtemp(), "training_checkpoints")
checkpoint_prefix = os.path.join(checkpoint_dir, "ckpt_{epoch:02d}.weights.h5")  # changed: Keras 3's ending


def decay(epoch):
    if epoch < 3:
        return 1e-3
    elif epoch >= 3 and epoch < 7:
        return 1e-4
    else:
        return 1e-5


class PrintLR(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        # changed: Keras 3 has `learning_rate`, and a variable is read by `float`
        print("\nLearning rate for epoch {} is {}".format(epoch + 1, float(model.optimizer.learning_rate)))


callbacks = [
    keras.callbacks.ModelCheckpoint(filepath=checkpoint_prefix, save_weights_only=True),
    keras.callbacks.LearningRateScheduler(decay),
    PrintLR(),
]

model.fit(train_dataset, epochs=options.epochs, callbacks=callbacks, verbose=2)

checkpoints = sorted(os.listdir(checkpoint_dir))
print("Checkpoints:", checkpoints)
model.load_weights(os.path.join(checkpoint_dir, checkpoints[-1]))

eval_loss, eval_acc = model.evaluate(eval_dataset, verbose=0)
print("Eval loss: {}, Eval Accuracy: {}".format(eval_loss, eval_acc))

path = os.path.join(checkpoint_dir, "model.keras")  # changed: Keras' own format for now
model.save(path)

unreplicated_model = keras.models.load_model(path)
again_loss, again_acc = unreplicated_model.evaluate(unisono.data.as_keras_input(eval_dataset), verbose=0)
print("Without the scope: loss: {}, Accuracy: {}".format(again_loss, again_acc))
assert abs(again_loss - eval_loss) < 1e-5
assert abs(again_acc - eval_acc) < 1e-6
