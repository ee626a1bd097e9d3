"""`tf.config` over JAX's devices."""

import jax
import pytest

from unisono import UnisonoError, tf


def test_devices():
    (cpu,) = tf.config.list_physical_devices("CPU")
    assert cpu.device_type == "CPU"
    assert len(tf.config.list_logical_devices("CPU")) == len(jax.devices("cpu"))
    assert tf.config.list_physical_devices("TPU") == []
    assert tf.test.is_gpu_available() == bool(tf.config.list_physical_devices("GPU"))


def test_devices_cannot_be_made_or_hidden_later():
    jax.devices()
    (cpu,) = tf.config.list_physical_devices("CPU")
    with pytest.raises(UnisonoError, match="top of the program"):
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()])
    with pytest.raises(UnisonoError, match="before JAX computes anything"):
        tf.config.set_visible_devices([], "GPU")
    tf.config.set_visible_devices([cpu], "CPU")


def test_functions_run_eagerly_where_told():
    seen = []

    @tf.function
    def traced(x):
        seen.append(type(x).__name__)
        return x

    tf.config.run_functions_eagerly(True)
    try:
        assert jax.config.jax_disable_jit
    finally:
        tf.config.run_functions_eagerly(False)
    traced(tf.constant(1))
    assert not jax.config.jax_disable_jit
