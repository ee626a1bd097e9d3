"""The API page of MirroredStrategy: mirrored variables, and a loop over a distributed dataset.

python examples/mirrored_variables.py

Needs nothing beyond Unisono; 10 s on two cores.
"""

import numpy as np
import unisono

strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"])  # changed: "GPU:0", "GPU:1" on a machine with GPUs
with strategy.scope():
    x = unisono.Variable(1.0)
print(x)

made: list[unisono.Variable] = []


@unisono.function  # Wrap the function with unisono.function.
def create_variable():
    if not made:
        made.append(unisono.Variable(1.0))
    return made[0]


with strategy.scope():
    _ = create_variable()
    print(made[0])

EPOCHS = 3
my_strategy = strategy
dataset = [np.arange(4, dtype="float32"), np.arange(5, dtype="float32")]

with my_strategy.scope():

    def distribute_train_epoch(dataset):
        def replica_fn(input):  # noqa: A002 (as on the page)
            result = (input**2).sum()
            return result

        total_result = 0
        for x in dataset:
            per_replica_result = my_strategy.run(replica_fn, args=(x,))
            total_result += my_strategy.reduce(unisono.ReduceOp.SUM, per_replica_result, axis=None)
        return total_result

    dist_dataset = my_strategy.experimental_distribute_dataset(dataset)
    for _ in range(EPOCHS):
        train_result = distribute_train_epoch(dist_dataset)
        print("Result:", float(train_result))

print("Resolver:", my_strategy.cluster_resolver)
