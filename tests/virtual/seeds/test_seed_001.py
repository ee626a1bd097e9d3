"""`tf.contrib.distribute` of 2018: a Keras model with its strategy, and an Estimator.

Its clusters are in tests/cluster/test_seed_programs.py.
"""

import jax
import numpy as np
import pytest

from tests.virtual.seeds import documents
from tests.virtual.seeds.programs import run
from unisono import tf

#: Fewer than the eight virtual devices, which would take turns on the cores.
TWO = {"contrib.distribute.MirroredStrategy()": 'contrib.distribute.MirroredStrategy(["cpu:0", "cpu:1"])'}


def test_compile_gives_a_model_its_strategy(monkeypatch, tmp_path):
    names = run(documents.CONTRIB_KERAS, monkeypatch, tmp_path, TWO)
    model, distribution, keras = (names[name] for name in ("model", "distribution", "keras"))
    for variable in (*model.weights, model.optimizer.iterations):
        assert len(distribution.experimental_local_results(variable)) == 2
    assert int(model.optimizer.iterations.numpy()) == 50
    assert names["loss"] < 1e-6
    np.testing.assert_allclose(names["predicted"], np.ones((10, 1)), atol=1e-3)

    # Saved with one strategy, resumed with another one and with none.
    model.save("model.keras")
    x, y = np.ones((8, 1), "float32"), np.zeros((8, 1), "float32")
    model.fit(x, y, batch_size=8, verbose=0)
    with tf.distribute.OneDeviceStrategy("cpu:3").scope():
        other = keras.models.load_model("model.keras")
    for loaded in (other, keras.models.load_model("model.keras")):
        assert int(loaded.optimizer.iterations.numpy()) == 50
        loaded.fit(x, y, batch_size=8, verbose=0)
        for weight, expected in zip(loaded.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_allclose(weight, expected, rtol=1e-6)


def test_compile_keeps_the_weights(monkeypatch, tmp_path):
    start = "distribution = tf"
    program = documents.CONTRIB_KERAS.replace(start, "before = model.get_weights()\n" + start)
    program = program.replace("model.fit(", "made = model.get_weights()\n0 and model.fit(")
    names = run(program.partition("eval_dataset,")[0], monkeypatch, tmp_path, TWO)
    for before, made in zip(names["before"], names["made"], strict=True):
        np.testing.assert_array_equal(made, before)


@pytest.fixture(scope="module")
def estimator(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        program = documents.MODEL_FN + documents.ESTIMATOR
        return run(program, patch, tmp_path_factory.mktemp("seed"), TWO)


def test_the_estimator_trains_evaluates_and_predicts(estimator):
    classifier = estimator["classifier"]
    values = [classifier.get_variable_value(f"dense/{name}") for name in ("kernel", "bias")]
    np.testing.assert_allclose(sum(values), [[1.0]], atol=1e-5)
    # Each of two devices takes one of a hundred elements in each step.
    assert estimator["metrics"]["global_step"] == 50
    assert estimator["metrics"]["loss"] < 1e-8
    logits = [p["logits"] for p in classifier.predict(estimator["input_fn"])]
    np.testing.assert_allclose(logits, np.ones((100, 1)), atol=1e-5)


def test_model_main_in_one_process(monkeypatch, tmp_path):
    """Also with the devices, reductions, shards and inputs of "Customization and Performance Tips"."""
    program = documents.MODEL_FN + documents.MODEL_MAIN.replace(
        "  tf.estimator.train_and", "  return tf.estimator.train_and"
    )
    devices = {"num_gpus_per_worker=2": f"num_gpus_per_worker={jax.local_device_count()}"}
    metrics, _ = run(program, monkeypatch, tmp_path, devices)["estimator"]
    assert metrics["global_step"] == 100 // jax.local_device_count()
    assert metrics["loss"] < 1e-8

    tips = {
        "contrib.distribute.CollectiveAllReduceStrategy(\n      num_gpus_per_worker=2)": (
            "contrib.distribute.MirroredStrategy(num_gpus=2, auto_shard_dataset=True,\n"
            "      cross_tower_ops=tf.contrib.distribute.AllReduceCrossTowerOps('nccl', num_packs=2))"
        ),
        "return tf.data.Dataset.zip((features, labels))": (
            "dataset = tf.data.Dataset.zip((features, labels)).apply(\n"
            "      tf.data.experimental.map_and_batch(lambda x, y: (x[0], y), batch_size=1))\n"
            "  return dataset.prefetch(buffer_size=None)"
        ),
        # A batch of one, in place of an element.
        "tf.reshape(logits, [])": "tf.reshape(logits, [-1])",
    }
    metrics, _ = run(program, monkeypatch, tmp_path, tips)["estimator"]
    assert metrics["global_step"] == 50
    assert metrics["loss"] < 1e-8


def test_the_task_that_tf_config_describes(monkeypatch, tmp_path):
    """Three workers and two servers, of which this process is worker 1."""
    monkeypatch.setenv("TF_CONFIG", "{}")
    addresses = {f"host{i}:port": f"host{i}:{2220 + i}" for i in range(1, 6)}
    run(documents.WITH_SERVERS, monkeypatch, tmp_path, addresses)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["host1:2221", "host2:2222", "host3:2223"],
        "ps": ["host4:2224", "host5:2225"],
    }
