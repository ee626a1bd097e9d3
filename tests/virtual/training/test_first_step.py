"""The first step of `fit`: what it loads, how often it traces the user's step, and what it compiles."""

import subprocess
import sys

PROGRAM = """
import sys
import numpy as np
import unisono

strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"])
import jax, keras

compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, fun_name=None, **_: "backend_compile" in event and compiled.append(fun_name)
)
traces = 0

class Model(keras.Sequential):
    def train_step(self, state, data):
        global traces
        traces += 1
        return super().train_step(state, data)

    def _get_metrics_result_or_logs(self, logs):
        results = super()._get_metrics_result_or_logs(logs)
        print("results", sorted({len(x.devices()) for x in results.values()}))
        print("kept", len(self.metrics[0].total.value.devices()))
        return results

with strategy.scope():
    layers = [keras.layers.Dense(n, activation="relu") for n in (24, 20, 16, 12)]
    model = Model([keras.Input((30,)), *layers, keras.layers.Dense(10)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(np.ones((16, 30), "float32"), np.zeros(16, "int32"), batch_size=8, verbose=0)
print("loaded", sorted({"grain", "orbax", "tensorstore", "tensorboard", "tensorflow"} & set(sys.modules)))
print("traces", traces)
print("steps", sum("with_token" in str(name) for name in compiled))
print("random", sum("uniform" in str(name) for name in compiled))
print("constants", sum("broadcast_in_dim" in str(name) for name in compiled))
"""


def test_what_the_first_step_loads_traces_and_compiles():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    # Five shapes of kernels take one program of random numbers, and their biases and Adam's variables none.
    # Two traces read how the step treats rows, and one is the program's.
    # What an epoch's results take is compiled for one device.
    expected = {"loaded": "[]", "traces": "3", "steps": "1", "random": "1", "constants": "0"}
    assert found == {**expected, "results": "[1]", "kept": "2"}
