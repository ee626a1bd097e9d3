"""The overview of strategies: five by name, and the classifier in the scope of a `MirroredStrategy`."""

import jax
import numpy as np
import pytest

import unisono
from tests.virtual.seeds import documents
from tests.virtual.seeds.programs import changed, digits, run
from unisono import tf

#: There are no GPUs here.
CPUS = {"/gpu:0": "/cpu:0", "/gpu:1": "/cpu:1"}


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        return run(documents.OVERVIEW, patch, tmp_path_factory.mktemp("seed"), CPUS)


def test_without_names_all_devices_are_used_and_with_names_these(names):
    assert names["every_device"].num_replicas_in_sync == jax.local_device_count()
    assert names["mirrored_strategy"].num_replicas_in_sync == 2


def test_a_gpu_that_is_not_there_is_named(monkeypatch, tmp_path):
    with pytest.raises(unisono.DeviceError, match="gpu:0"):
        run(documents.OVERVIEW, monkeypatch, tmp_path)


def test_variables_of_model_optimizer_and_metrics_are_mirrored_and_saved_without_devices(names, tmp_path):
    classifier, strategy = names["classifier"], names["strategy"]
    (images, labels), _ = digits(64, 0)
    classifier.fit(images[..., None] / 255, labels, batch_size=64, verbose=0)
    variables = classifier.weights + classifier.optimizer.variables + classifier.metrics_variables
    for variable in variables:
        assert len(strategy.experimental_local_results(variable)) == jax.local_device_count()
    tf.train.Checkpoint(model=classifier).save(tmp_path / "ckpt")
    plain = tf.keras.models.clone_model(classifier)
    tf.train.Checkpoint(model=plain).restore(tf.train.latest_checkpoint(tmp_path))
    for weight, other in zip(classifier.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, other)


def test_the_layers_that_the_document_shows_are_a_model_too(monkeypatch, tmp_path):
    """Without those that it has lost."""
    lost = [line for line in documents.OVERVIEW.splitlines() if "MaxPool" in line or "Flatten" in line]
    text = changed(documents.OVERVIEW, dict.fromkeys(lost, ""))
    assert run(text, monkeypatch, tmp_path, CPUS)["classifier"].output_shape == (None, 24, 24, 10)


def test_the_other_strategies():
    distribute = tf.distribute
    resolver = distribute.cluster_resolver.TPUClusterResolver(devices=["cpu:0", "cpu:1"])
    for strategy, replicas in (
        (distribute.TPUStrategy(resolver), 2),
        (distribute.MultiWorkerMirroredStrategy(), jax.local_device_count()),
        (distribute.experimental.CentralStorageStrategy(["cpu:1", "cpu:2"], "cpu:0"), 2),
        (distribute.experimental.CentralStorageStrategy(["cpu:3"]), 1),
    ):
        assert strategy.num_replicas_in_sync == replicas
        with strategy.scope():
            variable = tf.Variable(1.0)
        assert len(strategy.experimental_local_results(variable)) == replicas
        is_central = isinstance(strategy, distribute.experimental.CentralStorageStrategy)
        assert len(strategy.extended.parameter_devices) == (1 if is_central else replicas)
    assert issubclass(distribute.ParameterServerStrategy, distribute.Strategy)
