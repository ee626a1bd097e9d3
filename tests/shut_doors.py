"""A program that trains with every optional feature taken away, and then uses each.

It prints one object in JSON: which modules of Unisono it had loaded when it had trained (`modules`), and the
error of each use of a feature (`errors`). An import of a feature's folder fails, as if it were not there.

`python -m tests.shut_doors FOLDER...`: the folders, such as `unisono.sharding`.
"""

import importlib.abc
import json
import os
import sys
import tempfile

os.environ["KERAS_BACKEND"] = "jax"


class ShutDoors(importlib.abc.MetaPathFinder):
    """Refuses modules below some packages."""

    def __init__(self, folders):
        self.folders = tuple(f"{folder}." for folder in folders)

    def find_spec(self, name, path=None, target=None):
        if f"{name}.".startswith(self.folders):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


#: A program for each feature, which uses it.
USES = {
    "unisono.sharding": "unisono.MirroredStrategy(DEVICES, state_layout='sharded')",
    "unisono.compression": "unisono.CompressedAllReduce('bfloat16')",
    "unisono.local_updates": "unisono.LocalUpdates(every=2)",
    "unisono.parameter_server": "unisono.ParameterServerStrategy()",
    "unisono.cluster": "unisono.MultiWorkerMirroredStrategy()",
    "unisono.training.stateful": "stateful_step()",
    "unisono.training.resident": "data_on_devices()",
    "unisono.step.eager": "eager_tape()",
    "unisono.step.functions": "unisono.function(len)",
    "unisono.preprocessing": "unisono.preprocessing.StringLookup(vocabulary=['a'])",
    "unisono.checkpoint": "unisono.checkpoint.Checkpoint",
    "unisono.callbacks": "unisono.callbacks.BackupAndRestore",
    "unisono.estimator": "unisono.estimator.Estimator",
    "unisono.tf": "unisono.tf",
    "unisono.evaluator": "unisono.SidecarEvaluator",
    "unisono.launcher": "unisono.launch",
    "unisono.standalone": "unisono.standalone.StandardServer",
    "unisono.ray": "unisono.ray.Trainer",
}


def main():
    """Train, then use each feature that the arguments name."""
    sys.meta_path.insert(0, ShutDoors(sys.argv[1:]))
    import keras
    import numpy as np

    import unisono

    devices = ["cpu:0", "cpu:1"]
    strategy = unisono.MirroredStrategy(devices)
    x, y = np.random.default_rng(0).random((22, 3)), np.arange(22.0)[:, None]

    def model():
        keras.utils.set_random_seed(1)
        made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        made.compile("adam", "mse", metrics=["mae"])
        return made

    alone = model()
    expected = alone.fit(x, y, batch_size=5, epochs=2, verbose=0).history["loss"]
    with strategy.scope():
        made = model()
    seen = made.fit(x, y, batch_size=5, epochs=2, verbose=0, validation_data=(x, y)).history["loss"]
    np.testing.assert_allclose(seen, expected, rtol=1e-5)
    np.testing.assert_allclose(made.predict(x, verbose=0), alone.predict(x, verbose=0), rtol=1e-4)
    np.testing.assert_allclose(made.evaluate(x, y, verbose=0), alone.evaluate(x, y, verbose=0), rtol=1e-5)
    modules = sorted(m for m in sys.modules if m.partition(".")[0] == "unisono")

    folder = tempfile.mkdtemp(prefix="unisono-shut-")
    made.save(f"{folder}/model.keras")
    loaded = keras.models.load_model(f"{folder}/model.keras")
    np.testing.assert_allclose(loaded.predict(x, verbose=0), made.predict(x, verbose=0), rtol=1e-5)
    with strategy.scope():
        custom_loop(strategy, model(), x.astype("float32"), y.astype("float32"))

    names = {"unisono": unisono, "DEVICES": devices, "stateful_step": stateful_step, "eager_tape": eager_tape}
    names["data_on_devices"] = data_on_devices
    errors = {}
    for folder in sys.argv[1:]:
        try:
            exec(USES[folder], dict(names))
            errors[folder] = "nothing was raised"
        except Exception as error:
            errors[folder] = f"{type(error).__name__}: {error}"
    print(json.dumps({"modules": modules, "errors": errors}))


def custom_loop(strategy, model, x, y):
    """A loop over a distributed data set, with a tape."""
    import numpy as np

    import unisono

    def step(batch):
        with unisono.GradientTape() as tape:
            loss = unisono.nn.compute_average_loss((model(batch[0], training=True) - batch[1])[:, 0] ** 2)
        weights = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    data = unisono.data.Dataset.from_tensor_slices((x, y)).batch(6)
    losses = [
        float(strategy.reduce("sum", strategy.run(step, args=(batch,)), axis=None))
        for batch in strategy.distribute_dataset(data)
    ]
    assert len(losses) == 4
    assert np.isfinite(losses).all()


def stateful_step():
    """`fit` with a step in TensorFlow's form."""
    import keras
    import numpy as np

    import unisono

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            return {"loss": 0.0}

    with unisono.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = Own()
        model.compile("sgd", "mse")
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)


def data_on_devices():
    """`fit` with arrays that stay on the devices, as they do by default on GPUs."""
    import keras
    import numpy as np

    import unisono

    os.environ["UNISONO_RESIDENT_DATA"] = "1"
    with unisono.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    try:
        model.fit(np.ones((4, 2)), np.ones((4, 1)), batch_size=2, verbose=0)
    finally:
        del os.environ["UNISONO_RESIDENT_DATA"]


def eager_tape():
    """A derivative in eager code."""
    import keras

    import unisono

    variable = keras.Variable(2.0)
    with unisono.GradientTape() as tape:
        square = variable * variable
    tape.gradient(square, variable)


if __name__ == "__main__":
    main()
