"""The tutorial's transfer learning: a frozen base, then fine-tuning of its last layers.

    python examples/transfer_learning.py

changed: cats_vs_dogs and ImageNet weights are downloads. A small ResNet learns first whether a digit
is even; its weights then serve for another question: is the digit larger than four?

Needs scikit-learn (`pip install scikit-learn`); half a minute on two cores.
"""

import unisono  # before Keras, so that it runs on JAX
import keras

from _digits import devices, load

L = keras.layers
keras.utils.set_random_seed(1)
strategy = unisono.MirroredStrategy(devices())
print(f"Number of devices: {strategy.num_replicas_in_sync}")

(x_train, y_train), (x_test, y_test) = load()
x_train, x_test = (x[..., None].astype("float32") / 255 for x in (x_train, x_test))
batch_size = 32 * strategy.num_replicas_in_sync
Dataset = unisono.data.Dataset


def dataset(x, y):
    return (
        Dataset.from_tensor_slices((x, y.astype("float32")[:, None])).shuffle(1000, seed=0).batch(batch_size)
    )


def small_resnet():
    """Two residual blocks with batch normalization."""
    inputs = keras.Input((8, 8, 1))
    x = L.Conv2D(16, 3, padding="same", activation="relu")(inputs)
    for _ in range(2):
        y = L.Conv2D(16, 3, padding="same", use_bias=False)(x)
        y = L.BatchNormalization(momentum=0.9)(y)
        y = L.Activation("relu")(y)
        y = L.Conv2D(16, 3, padding="same", use_bias=False)(y)
        y = L.BatchNormalization(momentum=0.9)(y)
        x = L.Activation("relu")(L.Add()([x, y]))
    return keras.Model(inputs, x, name="small_resnet")


def with_head(base):
    model = keras.Sequential([base, L.GlobalAveragePooling2D(), L.Dense(1, activation="sigmoid")])
    return model


with strategy.scope():
    # changed: weights made on the spot instead of `weights='imagenet'`
    base_model = small_resnet()
    pretext = with_head(base_model)
    pretext.compile(optimizer="adam", loss="binary_crossentropy", metrics=["accuracy"])
pretext.fit(dataset(x_train, y_train % 2), epochs=4, verbose=2)

train_dataset = dataset(x_train, y_train > 4)
with strategy.scope():
    base_model.trainable = False  # Freeze the base model
    model = with_head(base_model)
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="binary_crossentropy", metrics=["accuracy"])

frozen = [w.copy() for w in base_model.get_weights()]
history = model.fit(train_dataset, epochs=5, verbose=2)
assert all((a == b).all() for a, b in zip(frozen, base_model.get_weights()))
print("The base is as it was.")

# Fine-tune the model
with strategy.scope():
    # Unfreeze some layers
    base_model.trainable = True
    for layer in base_model.layers[:-10]:
        layer.trainable = False

    model.compile(
        optimizer=keras.optimizers.Adam(0.001),  # Lower learning rate
        loss="binary_crossentropy",
        metrics=["accuracy"],
    )

# Continue training
history = model.fit(train_dataset, epochs=5, verbose=2)
loss, accuracy = model.evaluate(dataset(x_test, y_test > 4), verbose=0)
print(f"Accuracy after fine-tuning: {accuracy:.3f}")
