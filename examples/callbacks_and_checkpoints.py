"""The Keras tutorial of tf.distribute: callbacks, checkpoints, export, reload without and with the scope.

    python examples/callbacks_and_checkpoints.py [--mnist] [--epochs 10]

It writes ./training_checkpoints, ./logs (`tensorboard --logdir=logs`) and ./saved_model.

Needs scikit-learn (`pip install scikit-learn`); half a minute on two cores.
"""

import argparse
import glob
import os

import unisono  # before Keras, so that it runs on JAX
import keras

from _digits import devices, load

options = argparse.ArgumentParser()
options.add_argument("--mnist", action="store_true")
options.add_argument("--epochs", type=int, default=10)
options = options.parse_args()
keras.utils.set_random_seed(0)  # changed: the same numbers in each run

# Download the dataset
(x_train, y_train), (x_test, y_test) = load(options.mnist)  # changed: NumPy arrays, not tfds.load

# Define Distribution Strategy
strategy = unisono.MirroredStrategy(devices())
print("Number of devices: {}".format(strategy.num_replicas_in_sync))

# Setup Input pipeline
num_train_examples = len(x_train)
num_test_examples = len(x_test)
print("Examples:", num_train_examples, num_test_examples)

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

# Create the model
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

# Define the checkpoint directory to store the checkpoints
checkpoint_dir = "./training_checkpoints"
# Name of the checkpoint files
checkpoint_prefix = os.path.join(checkpoint_dir, "ckpt_{epoch:02d}.weights.h5")  # changed: Keras 3's ending


# Function for decaying the learning rate.
def decay(epoch):
    if epoch < 3:
        return 1e-3
    elif epoch >= 3 and epoch < 7:
        return 1e-4
    else:
        return 1e-5


# Callback for printing the LR at the end of each epoch.
class PrintLR(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        # changed: Keras 3 has `learning_rate`, and a variable is read by `float`
        print("\nLearning rate for epoch {} is {}".format(epoch + 1, float(model.optimizer.learning_rate)))


callbacks = [
    unisono.callbacks.TensorBoard(log_dir="./logs"),  # changed: Keras' own needs TensorFlow
    keras.callbacks.ModelCheckpoint(filepath=checkpoint_prefix, save_weights_only=True),
    keras.callbacks.LearningRateScheduler(decay),
    PrintLR(),
]

# Train and evaluate
model.fit(train_dataset, epochs=options.epochs, callbacks=callbacks, verbose=2)

# check the checkpoint directory
print("Checkpoints:", sorted(os.listdir(checkpoint_dir)))

# changed: tf.train.latest_checkpoint knows TensorFlow's format alone
latest = max(glob.glob(os.path.join(checkpoint_dir, "ckpt_*")), key=os.path.getmtime)
model.load_weights(latest)

eval_loss, eval_acc = model.evaluate(eval_dataset, verbose=0)
print("Eval loss: {}, Eval Accuracy: {}".format(eval_loss, eval_acc))

# the TensorBoard logs
for folder, _, files in sorted(os.walk("./logs")):
    print("Logs:", folder, len(files))

# Export to SavedModel
path = "saved_model/"
unisono.experimental.export_saved_model(model, path)

# Load the model without strategy.scope.
unreplicated_model = unisono.experimental.load_from_saved_model(path)
unreplicated_model.compile(
    loss="sparse_categorical_crossentropy", optimizer=keras.optimizers.Adam(), metrics=["accuracy"]
)
# changed: plain Keras does not know unisono's datasets
eval_loss, eval_acc = unreplicated_model.evaluate(unisono.data.as_keras_input(eval_dataset), verbose=0)
print("Without the scope: Eval loss: {}, Eval Accuracy: {}".format(eval_loss, eval_acc))

# Load the model with strategy.scope.
with strategy.scope():
    replicated_model = unisono.experimental.load_from_saved_model(path)
    replicated_model.compile(
        loss="sparse_categorical_crossentropy", optimizer=keras.optimizers.Adam(), metrics=["accuracy"]
    )
    eval_loss, eval_acc = replicated_model.evaluate(eval_dataset, verbose=0)
    print("With the scope: Eval loss: {}, Eval Accuracy: {}".format(eval_loss, eval_acc))
