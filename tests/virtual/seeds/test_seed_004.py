"""The tutorial on five strategies: `fit`, a custom loop, fine-tuning, and its wrong example."""

import numpy as np
import pytest

import unisono
from tests.virtual.seeds.programs import run

START = """
import random
import tensorflow as tf
import numpy as np

print(f"Num GPUs Available: {len(tf.config.list_physical_devices('GPU'))}")

def set_seeds(seed=42):
    tf.random.set_seed(seed)
    np.random.seed(seed)
    random.seed(seed)

set_seeds()
strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
print(f"Number of devices: {strategy.num_replicas_in_sync}")
(x_train, y_train), (x_test, y_test) = tf.keras.datasets.mnist.load_data()
x_train, x_test = x_train / 255.0, x_test / 255.0
x_train = x_train.reshape(-1, 784).astype('float32')
x_test = x_test.reshape(-1, 784).astype('float32')
batch_size = 64 * strategy.num_replicas_in_sync # Scale batch size by number of replicas
train_dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(10000).batch(batch_size)
test_dataset = tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(batch_size)
train_dataset = train_dataset.cache().prefetch(tf.data.AUTOTUNE)
"""

FIT = """
with strategy.scope():
    model = tf.keras.Sequential([
        tf.keras.layers.Dense(256, activation='relu', input_shape=(784,)),
        tf.keras.layers.Dense(128, activation='relu'),
        tf.keras.layers.Dense(10, activation='softmax')
    ])

    model.compile(
        optimizer='adam',
        loss='sparse_categorical_crossentropy',
        metrics=['accuracy']
    )

callbacks = [
    tf.keras.callbacks.ModelCheckpoint(
        filepath='checkpoint',
        save_weights_only=True,
        verbose=1
    )
]
model.fit(train_dataset, epochs=5, callbacks=callbacks, verbose=0)
eval_loss, eval_accuracy = model.evaluate(test_dataset, verbose=0)
print(f'Evaluation accuracy: {eval_accuracy:.3f}')
"""

CUSTOM_LOOP = """
dist_dataset = strategy.experimental_distribute_dataset(train_dataset)

with strategy.scope():
    model = tf.keras.Sequential([
        tf.keras.layers.Dense(256, activation='relu', input_shape=(784,)),
        tf.keras.layers.Dense(10)
    ])

    loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tf.keras.optimizers.Adam(0.001)
    train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name='train_accuracy')

def train_step(inputs):
    features, labels = inputs

    with tf.GradientTape() as tape:
        predictions = model(features, training=True)
        loss = loss_fn(labels, predictions)

    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    train_accuracy.update_state(labels, predictions)
    return loss

@tf.function
def distributed_train_step(inputs):
    per_replica_losses = strategy.run(train_step, args=(inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)

epochs = 3
losses, accuracies = [], []

for epoch in range(epochs):
    total_loss = 0.0
    num_batches = 0
    train_accuracy.reset_states()

    for step, batch in enumerate(dist_dataset):
        loss = distributed_train_step(batch)
        total_loss += loss
        num_batches += 1

        if step % 100 == 0:
            print(f"Epoch {epoch+1}, Step {step}, Loss: {loss:.4f}")

    losses.append((total_loss / num_batches).numpy())
    accuracies.append(train_accuracy.result().numpy())
    print(f"Epoch {epoch+1}, Loss: {total_loss/num_batches:.4f}, Accuracy: {train_accuracy.result():.4f}")
"""

FINE_TUNING = """
def preprocess(image, label):
    image = tf.image.resize(tf.reshape(tf.cast(image, tf.float32), (28, 28, 1)), (32, 32))
    image = tf.keras.applications.resnet50.preprocess_input(tf.image.grayscale_to_rgb(image))
    return image, label

images = tf.data.Dataset.from_tensor_slices((x_train[:64], y_train[:64] % 2))
train_dataset = images.map(preprocess).shuffle(1000).batch(16)

# The weights of ResNet50 cannot be downloaded in a test.
with strategy.scope():
    base_model = tf.keras.Sequential([
        tf.keras.layers.Conv2D(4, 3, input_shape=(32, 32, 3)),
        tf.keras.layers.BatchNormalization(),
        tf.keras.layers.ReLU(),
    ])
    base_model.trainable = False # Freeze the base model

    model = tf.keras.Sequential([
        base_model,
        tf.keras.layers.GlobalAveragePooling2D(),
        tf.keras.layers.Dense(1, activation='sigmoid')
    ])

    model.compile(
        optimizer=tf.keras.optimizers.Adam(0.0001),
        loss='binary_crossentropy',
        metrics=['accuracy']
    )
start = base_model.get_weights()
history = model.fit(train_dataset, epochs=1, verbose=0)
frozen = base_model.get_weights()
with strategy.scope():
    base_model.trainable = True
    for layer in base_model.layers[:-2]:
        layer.trainable = False

    model.compile(
        optimizer=tf.keras.optimizers.Adam(0.00001), # Lower learning rate
        loss='binary_crossentropy',
        metrics=['accuracy']
    )
history = model.fit(train_dataset, epochs=1, verbose=0)
tuned = base_model.get_weights()
"""

TOO_LATE = """
model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(2,))])
with strategy.scope():
    model.compile(optimizer='adam', loss='mse') # Too late!
"""

MIXED = """
import tensorflow as tf
policy = tf.keras.mixed_precision.Policy('mixed_float16')
tf.keras.mixed_precision.set_global_policy(policy)
name = tf.keras.mixed_precision.global_policy().name
tf.keras.mixed_precision.set_global_policy('float32')
"""


TPU = """
resolver = tf.distribute.cluster_resolver.TPUClusterResolver(devices=["cpu:0", "cpu:1"])
tf.config.experimental_connect_to_cluster(resolver)
tf.tpu.experimental.initialize_tpu_system(resolver)

strategy = tf.distribute.TPUStrategy(resolver)
print(f"Number of TPU devices: {strategy.num_replicas_in_sync}")
"""


def test_a_tpu_follows_the_same_pattern(monkeypatch, tmp_path, capsys):
    names = run(START + TPU + FIT.replace("epochs=5", "epochs=2"), monkeypatch, tmp_path)
    assert "Number of TPU devices: 2" in capsys.readouterr().out
    assert isinstance(names["strategy"], unisono.TPUStrategy)
    assert names["eval_accuracy"] > 0.4


def test_fit(monkeypatch, tmp_path, capsys):
    names = run(START + FIT, monkeypatch, tmp_path)
    assert names["eval_accuracy"] > 0.7
    assert (tmp_path / "checkpoint.weights.h5").is_file()
    assert "Evaluation accuracy: 0." in capsys.readouterr().out


def test_a_custom_loop(monkeypatch, tmp_path, capsys):
    names = run(START + CUSTOM_LOOP, monkeypatch, tmp_path)
    assert names["losses"][0] > names["losses"][1] > names["losses"][2]
    assert names["accuracies"][2] > 0.7
    assert f"Epoch 3, Loss: {names['losses'][2]:.4f}" in capsys.readouterr().out


def test_fine_tuning_keeps_the_weights(monkeypatch, tmp_path):
    names = run(START + FINE_TUNING, monkeypatch, tmp_path)
    for start, frozen in zip(names["start"], names["frozen"], strict=True):
        np.testing.assert_array_equal(start, frozen)
    # The convolution stays frozen, the normalization behind it is tuned.
    np.testing.assert_array_equal(names["tuned"][0], names["frozen"][0])
    assert np.abs(names["tuned"][2] - names["frozen"][2]).max() > 0


def test_the_wrong_example_is_an_error(monkeypatch, tmp_path):
    with pytest.raises(unisono.ScopeError, match="created outside of the scope"):
        run(START + TOO_LATE, monkeypatch, tmp_path)


def test_mixed_precision(monkeypatch, tmp_path):
    assert run(MIXED, monkeypatch, tmp_path)["name"] == "mixed_float16"
