"""What a step of `fit` costs the host, by `steps_per_execution`: Unisono and plain Keras, in turns.

    python benchmarks/host_time.py          # about a minute

The model is so small that the devices have next to nothing to compute. Counted is the CPU time of the thread
that runs Keras' loop, so that neither the devices' threads nor other programs count. The last column has a
callback that looks at each batch, and changes nothing. A second table has steps by themselves, and a third
one has steps of a loop of one's own, beside the same step by hand. Plain Keras runs in the same process, with
what Unisono wraps.
"""

import datetime
import time

import jax
import keras
import numpy as np
from _report import machine, markdown

import unisono

ROWS, STEPS, ROUNDS = 64, 480, 7
TOGETHER = (1, 2, 5, 10, 40)


class Looks(keras.callbacks.Callback):
    """Looks at each batch, or at as many as run together."""

    def on_train_batch_end(self, batch, logs=None):
        """Read the loss."""
        float(logs["loss"])


def built(strategy, together):
    """A compiled model, on a strategy or as plain Keras runs it."""
    keras.utils.set_random_seed(1)

    def make():
        model = keras.Sequential(
            [keras.layers.Input((8,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)]
        )
        model.compile("adam", "mse", steps_per_execution=together)
        return model

    if strategy is None:
        return make()
    with strategy.scope():
        return make()


def milliseconds(model, x, y, callbacks):
    """The host's CPU time of a step."""
    began = time.thread_time()
    model.fit(x, y, batch_size=ROWS, verbose=0, callbacks=callbacks)
    return 1000 * (time.thread_time() - began) / STEPS


#: Calls that run one step each, with arguments for one batch.
ALONE = {"train_on_batch": 2, "test_on_batch": 2, "predict_on_batch": 1}


def alone(owners, batch):
    """The lines of the table of steps by themselves: the host's CPU time of each call."""
    models = {name: built(owner, 1) for name, owner in owners.items()}
    cells = {(call, name): [] for call in (*ALONE, "fit, batch by batch") for name in owners}
    for number in range(ROUNDS + 1):
        for (call, name), times in cells.items():
            model, began = models[name], time.thread_time()
            if call in ALONE:
                for _ in range(STEPS // 4):
                    getattr(model, call)(*batch[: ALONE[call]])
            else:
                # A generator may depend on what the callback does: nothing runs ahead.
                batches = (batch for _ in range(STEPS // 4))
                options = {"verbose": 0, "shuffle": False, "callbacks": [Looks()]}
                model.fit(batches, steps_per_epoch=STEPS // 4, **options)
            if number:
                times.append(4000 * (time.thread_time() - began) / STEPS)
    calls = dict.fromkeys(call for call, _ in cells)
    return [["call", *owners], *([c, *(f"{min(cells[c, n]):.3f}" for n in owners)] for c in calls)]


def by_strategy(strategy, batch):
    """Calls that start a step of a loop on a strategy and return its loss, by what they are given."""
    with strategy.scope():
        model = built(None, 1)
        model.optimizer.build(model.trainable_variables)
        loss = keras.losses.MeanSquaredError(reduction="sum")

    def step(x, y):
        with unisono.GradientTape() as tape:
            total = loss(y, model(x, training=True)) / ROWS
        gradients = tape.gradient(total, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return total

    data = unisono.data.Dataset.from_tensor_slices(batch).batch(ROWS)
    distributed = next(iter(strategy.experimental_distribute_dataset(data)))
    return {name: lambda args=args: strategy.run(step, args) for name, args in given(distributed, batch)}


def by_hand(batch):
    """The same with JAX, as Keras' guide for its loops writes it."""
    model = built(None, 1)
    model.optimizer.build(model.trainable_variables)
    loss = keras.losses.MeanSquaredError(reduction="sum")

    def loss_of(trained, others, x, y):
        predictions, others = model.stateless_call(trained, others, x, training=True)
        return loss(y, predictions) / ROWS, others

    def step(state, x, y):
        trained, others, slots = state
        (total, others), gradients = jax.value_and_grad(loss_of, has_aux=True)(trained, others, x, y)
        trained, slots = model.optimizer.stateless_apply(slots, gradients, trained)
        return total, (trained, others, slots)

    parts = model.trainable_variables, model.non_trainable_variables, model.optimizer.variables
    held = [jax.tree.map(lambda v: v.value + 0, parts)]
    program = jax.jit(step, donate_argnums=0)

    def start(args):
        total, held[0] = program(held[0], *args)
        return total

    return {name: lambda args=args: start(args) for name, args in given(jax.device_put(batch), batch)}


def given(placed, batch):
    """What a step is given: arrays on the devices, or the host's."""
    return ("a batch on the devices", placed), ("two NumPy arrays", batch)


def own_loops(strategy, batch):
    """The lines of the table of loops of one's own: the host's CPU time of each step."""
    owners = {"`strategy.run`": by_strategy(strategy, batch), "JAX by hand": by_hand(batch)}
    cells = {(name, owner): [] for owner, calls in owners.items() for name in calls}
    for number in range(ROUNDS + 1):
        for (name, owner), times in cells.items():
            call, began = owners[owner][name], time.thread_time()
            for _ in range(STEPS // 4):
                loss = call()
            if number:
                times.append(4000 * (time.thread_time() - began) / STEPS)
            jax.block_until_ready(loss)
    names = dict.fromkeys(name for name, _ in cells)
    return [["given", *owners], *([n, *(f"{min(cells[n, o]):.3f}" for o in owners)] for n in names)]


def main():
    x, y = np.zeros((ROWS * STEPS, 8), "float32"), np.zeros((ROWS * STEPS, 1), "float32")
    strategy = unisono.MirroredStrategy(["cpu:0"])
    cells = {}
    for together in TOGETHER:
        for name, owner in (("Unisono", strategy), ("plain Keras", None)):
            for kind, callbacks in (("", []), ("looks", [Looks()])):
                cells[together, name, kind] = built(owner, together), callbacks, []
    # The first round compiles.
    for number in range(ROUNDS + 1):
        for model, callbacks, times in cells.values():
            taken = milliseconds(model, x, y, callbacks)
            if number:
                times.append(taken)
    lines = [["steps_per_execution", "Unisono", "plain Keras", "with a callback: Unisono", "plain Keras"]]
    for together in TOGETHER:
        values = [
            f"{min(cells[together, name, kind][2]):.3f}"
            for kind in ("", "looks")
            for name in ("Unisono", "plain Keras")
        ]
        lines.append([str(together), *values])
    facts = machine()
    print(f"{datetime.date.today()}: {facts['cpu']}, {facts['cores']} cores, {facts['versions']}.")
    print(f"The host's ms of CPU time a step, least of {ROUNDS} rounds, {ROWS} rows, one CPU device.\n")
    print(markdown(lines))
    owners = {"Unisono": strategy, "plain Keras": None}
    print("\nA step by itself:\n")
    print(markdown(alone(owners, (x[:ROWS], y[:ROWS]))))
    print("\nA step of a loop of one's own:\n")
    print(markdown(own_loops(strategy, (x[:ROWS], y[:ROWS]))))


if __name__ == "__main__":
    main()
