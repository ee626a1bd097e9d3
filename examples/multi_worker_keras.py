"""The first README of tf.distribute: its Keras model over several workers, CollectiveAllReduceStrategy.

unisono launch -n 2 examples/multi_worker_keras.py

By hand, in two shells, the second with "index": 1:

TF_CONFIG='{"cluster": {"worker": ["127.0.0.1:23456", "127.0.0.1:23457"]},
            "task": {"type": "worker", "index": 0}}' python examples/multi_worker_keras.py

Without TF_CONFIG it runs in one process, with the same numbers. The parts of that page about the Estimator
are in estimator.py.

Needs scikit-learn (`pip install scikit-learn`).
"""

import unisono  # before Keras, so that it runs on JAX
import keras

# changed: `num_gpus_per_worker` is not needed, every worker takes its own devices
distribution = unisono.CollectiveAllReduceStrategy()
print(f"Workers: {distribution.num_workers}, replicas: {distribution.num_replicas_in_sync}")

keras.utils.set_random_seed(0)

with distribution.scope():  # changed: the scope instead of `compile(distribute=distribution)`
    inputs = keras.layers.Input(shape=(1,))
    predictions = keras.layers.Dense(1)(inputs)
    model = keras.models.Model(inputs=inputs, outputs=predictions)
    model.compile(loss="mean_squared_error", optimizer=keras.optimizers.SGD(learning_rate=0.02))

Dataset = unisono.data.Dataset  # changed: tf.data's vocabulary without TensorFlow
features = Dataset.from_tensors([1.0]).repeat(10000).batch(10)
labels = Dataset.from_tensors([1.0]).repeat(10000).batch(10)
# The batches are global: two workers get 5 rows each.
train_dataset = eval_dataset = Dataset.zip((features, labels))
predict_dataset = features

history = model.fit(train_dataset, epochs=5, steps_per_epoch=10, verbose=2)
loss = model.evaluate(eval_dataset, steps=1, verbose=0)
predicted = model.predict(predict_dataset, steps=1, verbose=0)

# Every worker has the numbers of all; one of them prints.
if distribution.is_chief:
    print("Losses:", *[f"{value:.6f}" for value in history.history["loss"]])
    print(f"Evaluation loss: {loss:.6f}")
    print(f"Predictions: {predicted.shape[0]} rows, the first {predicted[0, 0]:.6f}")
