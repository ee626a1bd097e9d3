"""Names of devices, where variables and results lie, and mixed precision."""

import logging

import jax
import keras
import numpy as np
import pytest

import unisono
from tests.support import PLATFORM, devices
from tests.virtual.training._digits import crossentropy, digits, mlp, train

#: By how much losses differ, and a layer's weights in norm: bfloat16 has 8 bits, float16 11.
HALF = 0.03


@pytest.mark.parametrize(
    "name", ["{}:0", "/{}:0", "/device:{}:0", "/job:localhost/replica:0/task:0/device:{}:0"]
)
def test_names(name):
    for kind in (PLATFORM, PLATFORM.upper()):
        (device,) = unisono.MirroredStrategy([name.format(kind)]).mesh.devices
        assert (device.platform, device.id) == (PLATFORM, 0)


def test_by_default_all_devices_of_the_platform_are_replicas():
    there = jax.local_devices(backend=PLATFORM)
    assert list(unisono.MirroredStrategy().mesh.devices) == there
    assert unisono.MirroredStrategy(num_gpus=1).mesh.devices == (there[0],)


def test_what_is_trained_lies_on_the_devices(caplog):
    """Also with the exchange that TensorFlow's users name, which warns without GPUs."""
    with caplog.at_level(logging.WARNING, logger="unisono"):
        strategy = unisono.MirroredStrategy(devices(1), unisono.NcclAllReduce())
        with strategy.scope():
            model = mlp()
            model.compile("adam", crossentropy())
        model.fit(*digits(), batch_size=64, verbose=0)
    for variable in [*model.variables, *model.optimizer.variables]:
        assert variable.value.devices() == set(strategy.mesh.devices)
    warned = [record for record in caplog.records if "NCCL needs GPUs" in record.getMessage()]
    assert len(warned) <= (PLATFORM != "gpu")


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_on_all_devices_is_near_that_of_one(policy):
    def build():
        return mlp(keras.layers.Dense(32, activation="relu"))

    def compiled():
        return {"optimizer": keras.optimizers.SGD(0.1), "loss": crossentropy(), "metrics": ["accuracy"]}

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        expected = train(0, build, compiled)
        found = train(len(jax.local_devices(backend=PLATFORM)), build, compiled)
    finally:
        keras.config.set_dtype_policy(before)
    model = found["model"]
    assert model.layers[0].compute_dtype == policy.removeprefix("mixed_")
    assert {str(v.dtype) for v in model.trainable_variables} == {"float32"}
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer) is (policy == "mixed_float16")
    np.testing.assert_allclose(found["history"]["loss"], expected["history"]["loss"], rtol=HALF)
    assert found["history"]["loss"][-1] < found["history"]["loss"][0]
    for a, b in zip(found["weights"], expected["weights"], strict=True):
        assert np.linalg.norm(a - b) < HALF * np.linalg.norm(b)
