# %% [markdown]
# # What lies on which device
#
# Needs `pip install matplotlib`; half a minute on two cores. A model with Adam on four virtual devices: how
# many bytes of weights and of the optimizer's variables each device holds between steps, in each layout.
# 1.05 million weights in float32 are 4.2 MB; Adam keeps two numbers for each.

# %%
import gc

import jax
import matplotlib.pyplot as plt
import numpy as np
import unisono
import keras

DEVICES = [f"cpu:{i}" for i in range(4)]


# %%
def held(layout):
    """The MB on each device that JAX' arrays hold after a training, in one layout."""
    strategy = unisono.MirroredStrategy(DEVICES, state_layout=layout)
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((512,)), keras.layers.Dense(1024, "relu"), keras.layers.Dense(512)]
        )
        model.compile("adam", "mse")
    x = np.ones((64, 512), "float32")
    model.fit(x, x, batch_size=64, verbose=0)
    gc.collect()
    sizes = np.zeros(len(DEVICES))
    for array in jax.live_arrays():
        if id(array) not in before:
            for shard in array.addressable_shards:
                sizes[DEVICES.index(f"cpu:{shard.device.id}")] += shard.data.nbytes / 1e6
    return sizes


LAYOUTS = ("mirrored", "sharded", "fully_sharded")
sizes = {layout: held(layout) for layout in LAYOUTS}

# %%
figure, axes = plt.subplots(1, 3, figsize=(9, 2.8), layout="constrained", sharey=True)
for place, layout in zip(axes, LAYOUTS, strict=True):
    place.bar(range(4), sizes[layout], color="#0d9488")
    place.set(title=layout, xlabel="device", xticks=range(4))
axes[0].set_ylabel("MB between steps")
plt.show()

# %%
for layout in LAYOUTS:
    print(f"{layout}: {sizes[layout].round(1).tolist()} MB")
