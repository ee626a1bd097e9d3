# %% [markdown]
# # Killed, and resumed at the exact batch
#
# Needs `pip install scikit-learn matplotlib`; a minute on two cores. A training is started in a process of
# its own and killed with SIGKILL. The second start goes on behind the last backup. A third run is not
# disturbed at all: its weights are the same, bit for bit.

# %%
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

PROGRAM = """
import os, signal, sys, time
import unisono, keras
import numpy as np
from sklearn.datasets import load_digits

folder, kill_at = sys.argv[1], int(sys.argv[2])
digits = load_digits()
x, y = digits.data.astype("float32") / 16, digits.target
keras.utils.set_random_seed(1)
with unisono.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dropout(0.2),
                              keras.layers.Dense(10)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

class Note(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations)
        print(step, float(logs["loss"]), flush=True)
        time.sleep(0.05)  # as long as a step of a larger model takes: backups are written beside steps
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

backup = unisono.callbacks.BackupAndRestore(folder + "/backup", save_freq=10)
model.fit(x, y, batch_size=100, epochs=4, verbose=0, callbacks=[backup, Note()])
np.savez(folder + "/weights.npz", *model.get_weights())
"""


# %%
def run(folder, kill_at=0):
    """The exit code of the program, and its steps and losses."""
    command = [sys.executable, "-c", PROGRAM, str(folder), str(kill_at)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    rows = [line.split() for line in done.stdout.splitlines()]
    return done.returncode, np.array([(int(step), float(loss)) for step, loss in rows])


root = Path(tempfile.mkdtemp())
for name in ("disturbed", "whole"):
    (root / name).mkdir()
code, before = run(root / "disturbed", kill_at=38)
print("first start: exit code", code, "after step", int(before[-1, 0]))
code, after = run(root / "disturbed")
print("second start: exit code", code, "begins with step", int(after[0, 0]))
code, whole = run(root / "whole")

# %%
figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
axes.plot(*whole.T, color="#a8b3c1", linewidth=6, label="not disturbed")
axes.plot(*before.T, color="#0d9488", label="first start")
axes.plot(*after.T, "--", color="#134e4a", label="second start")
axes.axvline(before[-1, 0], color="#dc2626", linewidth=1)
axes.annotate(
    "kill -9", (before[-1, 0], axes.get_ylim()[1]), (4, -12), textcoords="offset points", color="#dc2626"
)
axes.set(xlabel="step", ylabel="loss of the epoch so far")
axes.legend()
plt.show()

# %%
one, other = (np.load(root / name / "weights.npz") for name in ("disturbed", "whole"))
print("the same bits:", all(np.array_equal(one[key], other[key]) for key in one.files))
