"""Programs of TensorFlow's documents on two workers: `unisono launch -m unisono.tf`, and nothing changed."""

from tests import forked

#: The tutorial on several workers: each writes to a place of its own, which all but the chief delete.
PROGRAM = """
import json
import os

import numpy as np
import tensorflow as tf

num_workers = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
strategy = tf.distribute.MultiWorkerMirroredStrategy()
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(8 * num_workers)

with strategy.scope():
  model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
  model.compile(loss="mse", optimizer=tf.keras.optimizers.SGD(learning_rate=0.1))
model.fit(dataset.repeat(), epochs=2, steps_per_epoch=4, verbose=0)

def _is_chief(task_type, task_id):
  return (task_type == 'worker' and task_id == 0) or task_type is None

def _get_temp_dir(dirpath, task_id):
  temp_dir = os.path.join(dirpath, 'workertemp_' + str(task_id))
  tf.io.gfile.makedirs(temp_dir)
  return temp_dir

def write_filepath(filepath, task_type, task_id):
  dirpath, base = os.path.dirname(filepath), os.path.basename(filepath)
  if not _is_chief(task_type, task_id):
    dirpath = _get_temp_dir(dirpath, task_id)
  return os.path.join(dirpath, base)

here = os.getcwd()
task_type, task_id = (strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id)
write_model_path = write_filepath(os.path.join(here, "keras-model"), task_type, task_id)
model.save(write_model_path)
if not _is_chief(task_type, task_id):
  tf.io.gfile.rmtree(os.path.dirname(write_model_path))
loaded = tf.keras.models.load_model(os.path.join(here, "keras-model"))

step = tf.Variable(initial_value=tf.constant(0, dtype=tf.dtypes.int32), name='step')
checkpoint = tf.train.Checkpoint(model=model, step=step)
write_checkpoint_dir = write_filepath(os.path.join(here, "ckpt"), task_type, task_id)
manager = tf.train.CheckpointManager(checkpoint, directory=write_checkpoint_dir, max_to_keep=1)
for _ in range(2):
  step.assign_add(1)
  manager.save()
  if not _is_chief(task_type, task_id):
    tf.io.gfile.rmtree(write_checkpoint_dir)
weights = model.get_weights()
step.assign(7)
model.set_weights([0 * w for w in weights])
checkpoint.restore(tf.train.latest_checkpoint(os.path.join(here, "ckpt")))
same = all((a == b).all() and (a == c).all()
           for a, b, c in zip(weights, model.get_weights(), loaded.get_weights()))
print("done", task_id, same, int(step.numpy()), float(weights[0].sum()), flush=True)
"""


def test_each_worker_writes_to_a_place_of_its_own(tmp_path):
    (tmp_path / "main.py").write_text(PROGRAM)
    logs = tmp_path / "logs"
    command = ["-m", "unisono", "launch", "-n", "2", "--log-dir", str(logs)]
    done = forked.run([*command, "-m", "unisono.tf", "main.py"], tmp_path, 240)
    assert done.returncode == 0, done.stdout + done.stderr
    said = sorted(
        line
        for path in logs.glob("*.log")
        for line in path.read_text().splitlines()
        if line.startswith("done")
    )
    assert [line.split()[1:4] for line in said] == [["0", "True", "2"], ["1", "True", "2"]]
    assert said[0].split()[4] == said[1].split()[4]
    assert sorted(p.name for p in (tmp_path / "ckpt").iterdir() if p.name.startswith("ckpt")) == ["ckpt-2"]
    assert not list((tmp_path / "workertemp_1").iterdir())
