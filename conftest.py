"""Eight virtual CPU devices for all tests and doctests, before JAX starts."""

import os

os.environ["KERAS_BACKEND"] = "jax"
# Room for the collectives of eight devices: see `unisono/_mesh.py`.
os.environ["PJRT_NPROC"] = "16"

import jax

jax.config.update("jax_num_cpu_devices", 8)
