"""`tf.contrib.distribute` of 2018: a Keras model is given its strategy by `compile`."""

import numpy as np

from tests.virtual.seeds.programs import run

PROGRAM = """
import tensorflow as tf
from tensorflow import keras

inputs = tf.keras.layers.Input(shape=(1,))
predictions = tf.keras.layers.Dense(1)(inputs)
model = tf.keras.models.Model(inputs=inputs, outputs=predictions)

features = tf.data.Dataset.from_tensors([1.]).repeat(10000).batch(10)
labels = tf.data.Dataset.from_tensors([1.]).repeat(10000).batch(10)
train_dataset = tf.data.Dataset.zip((features, labels))
eval_dataset, predict_dataset = train_dataset, features
before = model.get_weights()

distribution = tf.contrib.distribute.MirroredStrategy(devices)
model.compile(loss='mean_squared_error',
              optimizer=tf.train.GradientDescentOptimizer(learning_rate=0.2),
              distribute=distribution)
made = model.get_weights()

model.fit(train_dataset, epochs=5, steps_per_epoch=10, verbose=0)
loss = model.evaluate(eval_dataset, steps=1, verbose=0)
predicted = model.predict(predict_dataset, steps=1, verbose=0)
model.save("model.keras")
"""


def test_compile_gives_a_model_its_strategy(monkeypatch, tmp_path):
    names = run(PROGRAM, monkeypatch, tmp_path, devices=["cpu:0", "cpu:1"])
    for before, made in zip(names["before"], names["made"], strict=True):
        np.testing.assert_array_equal(made, before)
    for variable in (*names["model"].weights, names["model"].optimizer.iterations):
        assert len(names["distribution"].experimental_local_results(variable)) == 2
    assert int(names["model"].optimizer.iterations.numpy()) == 50
    assert names["loss"] < 1e-6
    np.testing.assert_allclose(names["predicted"], np.ones((10, 1)), atol=1e-3)
    loaded = names["keras"].models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(np.ones((1, 1)), verbose=0), [[1.0]], atol=1e-3)
