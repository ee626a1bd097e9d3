"""Parameter servers with `fit`: one script for all tasks, as in TensorFlow's overview of strategies.

unisono launch -n 2 --ps 1 --chief examples/parameter_server_fit.py
unisono launch -n 2 --ps 1 --chief --evaluator examples/parameter_server_fit.py    # evaluation beside

By hand, one shell for each task, with its type and index; without a job "chief" worker 0 is the chief:

TF_CONFIG='{"cluster": {"worker": ["127.0.0.1:23456", "127.0.0.1:23457"], "ps": ["127.0.0.1:23458"]},
            "task": {"type": "worker", "index": 0}}' python examples/parameter_server_fit.py

Without TF_CONFIG variables live on the CPU, and all devices of this machine compute.

Needs scikit-learn (`pip install scikit-learn`), with servers the extra `cluster`.
"""

import unisono  # before Keras, so that it runs on JAX
import keras

from _digits import load

# In workers and parameter servers the constructor serves the chief, and does not return.
strategy = unisono.experimental.ParameterServerStrategy()
resolver = strategy.cluster_resolver
keras.utils.set_random_seed(0)

(x_train, y_train), (x_test, y_test) = load()
x_train = x_train.reshape(-1, 64).astype("float32") / 255.0  # changed: digits of 8 x 8 pixels
x_test = x_test.reshape(-1, 64).astype("float32") / 255.0

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])

if resolver is not None and resolver.task_type == "evaluator":
    evaluator = unisono.SidecarEvaluator(model, (x_test, y_test), "run/checkpoints")
    evaluator.start()  # until the launcher says that training has ended
else:
    # Each batch goes to a worker; a replica is one step of one worker, so `num_replicas_in_sync` is 1.
    batch_size = 64 * strategy.num_replicas_in_sync
    print("Batch size:", batch_size)
    save = keras.callbacks.ModelCheckpoint("run/checkpoints/{epoch:02d}.keras")
    model.fit(x_train, y_train, batch_size=batch_size, epochs=8, callbacks=[save], verbose=2)
    loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
    print(f"Steps: {int(model.optimizer.iterations.numpy())}")
    print(f"Evaluation accuracy: {accuracy:.3f}")
    print("Predictions:", *model.predict(x_test[:10], verbose=0).argmax(1))
