"""The overview of strategies: the classifier in the scope of a `MirroredStrategy`."""

import numpy as np

from tests.virtual.seeds.programs import run

PROGRAM = """
import tensorflow as tf

mirrored_strategy = tf.distribute.MirroredStrategy()
mirrored_strategy = tf.distribute.MirroredStrategy(devices=["/cpu:0", "/cpu:1"])
central = tf.distribute.experimental.CentralStorageStrategy()

strategy = tf.distribute.MirroredStrategy()

with strategy.scope():
  classifier = tf.keras.Sequential([
    tf.keras.layers.Conv2D(32, (3,3), activation = 'relu', input_shape = (28,28,1)),
    tf.keras.layers.MaxPooling2D(),
    tf.keras.layers.Conv2D(64, (3, 3), activation='relu'),
    tf.keras.layers.Flatten(),
    tf.keras.layers.Dense(64, activation = 'relu'),
    tf.keras.layers.Dense(10, activation = 'softmax')
  ])
"""


def test_the_classifier_is_made_on_two_devices(monkeypatch, tmp_path):
    names = run(PROGRAM, monkeypatch, tmp_path)
    assert names["mirrored_strategy"].num_replicas_in_sync == 2
    strategy, kernel = names["strategy"], names["classifier"].layers[0].kernel
    assert len(strategy.experimental_local_results(kernel)) == strategy.num_replicas_in_sync > 1
    made = names["classifier"](np.ones((4, 28, 28, 1)))
    np.testing.assert_allclose(made.numpy().sum(axis=-1), 1, rtol=1e-5)
