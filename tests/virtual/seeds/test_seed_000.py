"""The overview of strategies: the classifier in the scope of a `MirroredStrategy`."""

import os
import subprocess
import sys

PROGRAM = """
import tensorflow as tf

mirrored_strategy = tf.distribute.MirroredStrategy()
mirrored_strategy = tf.distribute.MirroredStrategy(devices=["/cpu:0", "/cpu:1"])
central = tf.distribute.experimental.CentralStorageStrategy()

strategy = tf.distribute.MirroredStrategy()

with strategy.scope():
  classifier = tf.keras.Sequential([
    tf.keras.layers.Conv2D(32, (3,3), activation = 'relu', input_shape = (28,28,1)),
    tf.keras.layers.MaxPooling2D(),
    tf.keras.layers.Conv2D(64, (3, 3), activation='relu'),
    tf.keras.layers.Flatten(),
    tf.keras.layers.Dense(64, activation = 'relu'),
    tf.keras.layers.Dense(10, activation = 'softmax')
  ])
"""


SHOWN = """
import numpy as np
kernel = classifier.layers[0].kernel
print(mirrored_strategy.num_replicas_in_sync, len(strategy.experimental_local_results(kernel)))
print(np.round(classifier(np.ones((4, 28, 28, 1))).numpy().sum(axis=-1), 5).tolist())
"""


def test_the_classifier_is_made_on_two_devices(tmp_path):
    """In a process of its own, without any edit."""
    (tmp_path / "program.py").write_text(PROGRAM + SHOWN)
    done = subprocess.run(
        [sys.executable, "-m", "unisono.tf", "program.py"],
        cwd=tmp_path,
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["2 2", "[1.0, 1.0, 1.0, 1.0]"]
