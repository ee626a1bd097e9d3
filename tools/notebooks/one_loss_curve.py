# %% [markdown]
# # One loss curve on one, two and four devices
#
# Needs `pip install scikit-learn matplotlib`; half a minute on two cores. The same program trains on one
# device and on several virtual ones, with a global batch of 50 rows, which four does not divide. The curves
# lie on each other.

# %%
import matplotlib.pyplot as plt
import numpy as np
import unisono
import keras
from sklearn.datasets import load_digits

digits = load_digits()
x, y = digits.data.astype("float32") / 16, digits.target


# %%
def losses(devices):
    """The loss of each batch of two epochs."""
    keras.utils.set_random_seed(1)
    with unisono.MirroredStrategy(devices).scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    found = []

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            found.append(float(logs["loss"]))

    model.fit(x, y, batch_size=50, epochs=2, verbose=0, callbacks=[Note()])
    return np.array(found)


curves = {n: losses([f"cpu:{i}" for i in range(n)]) for n in (4, 2, 1)}  # virtual devices: the most first

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
looks = {1: ("-", "#a8b3c1", 6), 2: ("-", "#0d9488", 3), 4: (":", "#111827", 2)}
for n, (style, color, width) in looks.items():
    label = f"{n} device{'s' * (n > 1)}"
    left.plot(curves[n], style, label=label, color=color, linewidth=width)
left.set(xlabel="step", ylabel="loss of the epoch so far", title="The curves")
left.legend()
for n in (2, 4):
    distance = np.abs(curves[n] - curves[1])
    right.semilogy(np.maximum(distance, 1e-9), label=f"{n} devices", color={2: "#0d9488", 4: "#7b8794"}[n])
right.set(xlabel="step", ylabel="distance from one device", ylim=(1e-9, 1), title="Rounding of float32")
right.legend()
plt.show()

# %%
print("largest distance:", max(np.abs(curves[n] - curves[1]).max() for n in (2, 4)))
