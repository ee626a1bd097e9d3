"""The Keras tutorial of TensorFlow 2.0: callbacks, checkpoints, export."""

import os

import pytest

from tests.virtual.seeds.programs import run

PROGRAM = """
from __future__ import absolute_import, division, print_function, unicode_literals
import tensorflow as tf
import os

# `tensorflow_datasets` needs TensorFlow: the same examples from Keras.
train, test = tf.keras.datasets.mnist.load_data()
mnist_train, mnist_test = (
    tf.data.Dataset.from_tensor_slices((x[..., None], y.astype("int64"))) for x, y in (train, test))

strategy = tf.distribute.MirroredStrategy()
print ('Number of devices: {}'.format(strategy.num_replicas_in_sync))

BUFFER_SIZE = 10000
BATCH_SIZE_PER_REPLICA = 16
BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync

def scale(image, label):
  image = tf.cast(image, tf.float32)
  image /= 255

  return image, label

train_dataset = mnist_train.map(scale).shuffle(BUFFER_SIZE).batch(BATCH_SIZE)
eval_dataset = mnist_test.map(scale).batch(BATCH_SIZE)

with strategy.scope():
  model = tf.keras.Sequential([
      tf.keras.layers.Conv2D(32, 3, activation='relu', input_shape=(28, 28, 1)),
      tf.keras.layers.MaxPooling2D(),
      tf.keras.layers.Flatten(),
      tf.keras.layers.Dense(64, activation='relu'),
      tf.keras.layers.Dense(10, activation='softmax')
  ])
  model.compile(loss='sparse_categorical_crossentropy',
                optimizer=tf.keras.optimizers.Adam(),
                metrics=['accuracy'])

checkpoint_dir = './training_checkpoints'
checkpoint_prefix = os.path.join(checkpoint_dir, "ckpt_{epoch}")
def decay(epoch):
  if epoch < 1:
    return 1e-3
  elif epoch >= 1 and epoch < 2:
    return 1e-4
  else:
    return 1e-5
rates = []
class PrintLR(tf.keras.callbacks.Callback):
  def on_epoch_end(self, epoch, logs=None):
    rates.append(float(tf.keras.backend.get_value(model.optimizer.lr)))
    print ('\\nLearning rate for epoch {} is {}'.format(
        epoch + 1, tf.keras.backend.get_value(model.optimizer.lr)))
callbacks = [
    tf.keras.callbacks.TensorBoard(log_dir='./logs'),
    tf.keras.callbacks.ModelCheckpoint(filepath=checkpoint_prefix,
                                       save_weights_only=True),
    tf.keras.callbacks.LearningRateScheduler(decay),
    PrintLR()
]

model.fit(train_dataset, epochs=3, callbacks=callbacks, verbose=0)

# Keras 3 has its checkpoints in files of their own: `tf.train.latest_checkpoint` finds those of
# `tf.train.Checkpoint`.
model.load_weights(os.path.join(checkpoint_dir, sorted(os.listdir(checkpoint_dir))[-1]))
eval_loss, eval_acc = model.evaluate(eval_dataset, verbose=0)

path = 'saved_model/'
tf.keras.experimental.export_saved_model(model, path)

unreplicated_model = tf.keras.experimental.load_from_saved_model(path)
unreplicated_model.compile(
    loss='sparse_categorical_crossentropy',
    optimizer=tf.keras.optimizers.Adam(),
    metrics=['accuracy'])
loaded = unreplicated_model.evaluate(eval_dataset, verbose=0)

with strategy.scope():
  replicated_model = tf.keras.experimental.load_from_saved_model(path)
  replicated_model.compile(loss='sparse_categorical_crossentropy',
                           optimizer=tf.keras.optimizers.Adam(),
                           metrics=['accuracy'])
  replicated = replicated_model.evaluate(eval_dataset, verbose=0)
"""


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_the_keras_tutorial(monkeypatch, tmp_path, capsys):
    names = run(PROGRAM, monkeypatch, tmp_path)
    assert names["strategy"].num_replicas_in_sync > 1
    assert [round(rate, 9) for rate in names["rates"]] == [1e-3, 1e-4, 1e-5]
    assert "Learning rate for epoch 3 is 9.99" in capsys.readouterr().out
    files = [f"ckpt_{epoch}.weights.h5" for epoch in (1, 2, 3)]
    assert sorted(os.listdir(tmp_path / "training_checkpoints")) == files
    assert list((tmp_path / "logs").rglob("events.out.tfevents.*"))
    evaluated = [names["eval_loss"], names["eval_acc"]]
    for other in (names["loaded"], names["replicated"]):
        assert [round(x, 4) for x in other] == [round(x, 4) for x in evaluated]
