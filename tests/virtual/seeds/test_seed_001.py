"""`tf.contrib.distribute` of 2018: a Keras model with its strategy, and an Estimator."""

import jax
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


ESTIMATOR = """
import tensorflow as tf

def model_fn(features, labels, mode):
  layer = tf.layers.Dense(1)
  logits = layer(features)

  if mode == tf.estimator.ModeKeys.PREDICT:
    predictions = {"logits": logits}
    return tf.estimator.EstimatorSpec(mode, predictions=predictions)

  loss = tf.losses.mean_squared_error(
      labels=labels, predictions=tf.reshape(logits, []))

  if mode == tf.estimator.ModeKeys.EVAL:
    return tf.estimator.EstimatorSpec(mode, loss=loss)

  if mode == tf.estimator.ModeKeys.TRAIN:
    train_op = tf.train.GradientDescentOptimizer(0.2).minimize(loss)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

def input_fn():
  features = tf.data.Dataset.from_tensors([[1.]]).repeat(100)
  labels = tf.data.Dataset.from_tensors(1.).repeat(100)
  return tf.data.Dataset.zip((features, labels))

distribution = tf.contrib.distribute.MirroredStrategy(devices)
config = tf.estimator.RunConfig(train_distribute=distribution)
classifier = tf.estimator.Estimator(model_fn=model_fn, config=config)
classifier.train(input_fn)
first = classifier.get_variable_value("dense/kernel") + classifier.get_variable_value("dense/bias")
steps = classifier.get_variable_value("global_step")
loss = classifier.evaluate(input_fn)["loss"]
logits = [p["logits"] for p in classifier.predict(input_fn)]

def model_main():
  distribution = tf.contrib.distribute.CollectiveAllReduceStrategy()
  config = tf.estimator.RunConfig(train_distribute=distribution)
  estimator = tf.estimator.Estimator(model_fn=model_fn, config=config)
  train_spec = tf.estimator.TrainSpec(input_fn=input_fn)
  eval_spec = tf.estimator.EvalSpec(input_fn=input_fn)
  return tf.estimator.train_and_evaluate(estimator, train_spec, eval_spec)

metrics, _ = model_main()
"""


def test_the_estimator_trains_and_evaluates(monkeypatch, tmp_path):
    names = run(ESTIMATOR, monkeypatch, tmp_path, devices=["cpu:0", "cpu:1"])
    np.testing.assert_allclose(names["first"], [[1.0]], atol=1e-5)
    # Each of two devices takes one of a hundred elements in each step.
    assert names["steps"] == 50
    assert names["loss"] < 1e-8
    np.testing.assert_allclose(names["logits"], np.ones((100, 1)), atol=1e-5)
    # All devices of this machine.
    assert names["metrics"]["global_step"] == 100 // jax.local_device_count()
    assert names["metrics"]["loss"] < 1e-8
