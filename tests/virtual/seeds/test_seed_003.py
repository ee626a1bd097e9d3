"""The page on `MirroredStrategy`: variables, and the loop over a distributed dataset."""

import pytest

from tests.virtual.seeds.programs import run

PROGRAM = """
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
  outside = tf.Variable(1.)

x = []
@tf.function  # Wrap the function with tf.function.
def create_variable():
  if not x:
    x.append(tf.Variable(1.))
  return x[0]
with strategy.scope():
  _ = create_variable()
  created = x[0]

EPOCHS = 2
dataset = tf.data.Dataset.range(7).batch(4)
my_strategy = tf.distribute.MirroredStrategy()
with my_strategy.scope():
  def distribute_train_epoch(dataset):
    def replica_fn(input):
      result = tf.reduce_sum(input)
      return result

    total_result = 0
    for x in dataset:
      per_replica_result = my_strategy.run(replica_fn, args=(x,))
      total_result += my_strategy.reduce(tf.distribute.ReduceOp.SUM,
                                         per_replica_result, axis=None)
    return total_result

  results = []
  dist_dataset = my_strategy.experimental_distribute_dataset(dataset)
  for _ in range(EPOCHS):
    results.append(distribute_train_epoch(dist_dataset))
resolver = my_strategy.cluster_resolver
"""


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        return run(PROGRAM, patch, tmp_path_factory.mktemp("seed"))


def test_variables_are_on_both_devices(names):
    for name in ("outside", "created"):
        assert "0: <" in repr(names[name])
        assert "1: <" in repr(names[name])


def test_the_loop_counts_every_example_in_each_epoch(names):
    assert [result.numpy() for result in names["results"]] == [21, 21]
    assert names["resolver"] is None
