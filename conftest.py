"""Eight virtual CPU devices for all tests and doctests, before JAX starts.

In a worker of a cluster (`tests/cluster/test_contract.py` runs the contract in several processes)
the strategy makes the devices.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

if "TF_CONFIG" not in os.environ:
    # Room for the collectives of eight devices: see `unisono/_mesh.py`.
    os.environ["PJRT_NPROC"] = "16"

    import jax

    jax.config.update("jax_num_cpu_devices", 8)

# Both set variables of the environment when they are imported; no test must be blamed for that.
import keras  # noqa: F401
import sklearn  # noqa: F401
