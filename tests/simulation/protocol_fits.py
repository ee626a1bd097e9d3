"""Keras on parameter servers: `fit` and its callbacks, `evaluate`, `predict`, steps in both forms.

Real: the train functions of the chief, `Job`, `RemoteVariables`, `RandomStreams`, `RunningCalls`, the
programs, which XLA computes, and what `protocol_closures` and `protocol_servers` have. A step adds one to the
weight of each of its rows, whatever the values are that it has pulled. Promised, and checked:

- each row of each epoch counts once, also where servers, workers or the chief were killed, where a callback
  reads and assigns weights, and where `fit` was left by an error; an interrupted `fit` counts none twice;
- metrics count each batch of an epoch once, the optimizer each step, a random generator each run;
- `evaluate` and `predict` see all steps, and rows in their order;
- data that workers make are used in their order, once.

Tests: tests/unit/test_simulated_trainings.py.
"""

import dataclasses
import functools

import keras
import numpy as np

import unisono
from tests.simulation._trainings import Trainings
from tests.simulation._world import SETTING
from tests.simulation.protocol_servers import Plan, run_servers
from unisono._errors import OutOfRangeError

#: Rows of a batch, batches of an epoch.
SIZE, BATCHES = 2, 3
EPOCHS = 2
#: What a callback raises.
ERRORS = ValueError("the callback's own error"), KeyboardInterrupt()
#: The weights: more than any settings need, as each number of them has programs of its own.
ROWS = 36
#: What a callback adds to the bias, which each step increases by `SIZE`.
_MORE = 64.0


class Shift(keras.layers.Layer):
    """Adds a weight, and a random number times zero."""

    def __init__(self):
        super().__init__(name="shift")
        self.seeds = keras.random.SeedGenerator(5)

    def build(self, shape):
        """Make the weight."""
        self.bias = self.add_weight(shape=(1,), initializer="zeros", name="bias")

    def call(self, x, training=None):
        """Shift."""
        if training:
            x = x + 0.0 * keras.random.uniform((), seed=self.seeds)
        return x + self.bias


class Count(keras.metrics.Metric):
    """Counts batches."""

    def __init__(self):
        super().__init__(name="count")
        self.number = self.add_weight(shape=(), initializer="zeros", name="number")

    def update_state(self, y, y_pred, sample_weight=None):
        """Count."""
        self.number.assign_add(1.0)

    def result(self):
        """Return how many there were."""
        return self.number + 0.0


class TapeModel(keras.Model):
    """Has a step in TensorFlow's form."""

    def train_step(self, data):
        """Train."""
        x, y = data
        with unisono.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return self.compute_metrics(x, y, y_pred)


def negative(y, y_pred):
    """The loss: its gradient does not depend on the weights."""
    return y * y_pred


def rows_of(first, count, short):
    """Return inputs and targets; each row has a weight of its own."""
    size = SIZE - short
    return np.arange(first, first + count, dtype="int32")[:, None], np.full((count, 1), -size, "float32")


def batches_of(each, short, context):
    """Return the batches of a worker; the last one may be shorter."""
    worker = context.input_pipeline_id
    counts = [SIZE] * (each - 1) + [SIZE - short]
    return [rows_of((worker * each + i) * SIZE, count, SIZE - count) for i, count in enumerate(counts)]


class Own(keras.callbacks.Callback):
    """Reads and assigns weights, keeps a backup, or raises."""

    def __init__(self, fits, at=None):
        super().__init__()
        self.fits, self.at = fits, at

    def on_epoch_end(self, epoch, logs=None):
        """Look at the weights."""
        self.fits.look_at(self.model, epoch + 1, logs)
        if self.at == ("epoch", epoch):
            raise self.fits.raises

    def on_train_batch_begin(self, batch, logs=None):
        """Leave, perhaps."""
        if self.at and self.at[0] == "batch" and batch >= self.at[1]:
            raise self.fits.raises


@dataclasses.dataclass(frozen=True)
class Kind:
    """What is trained. Each one has programs of its own, so that there are few.

    Args:
        has_tape: whether the step is in TensorFlow's form.
        makes_data: whether workers make the data; `validates`: with those of a validation.
        short: rows that the last batch of a worker has less.
        together: `steps_per_execution`.
    """

    optimizer: str = "sgd"
    has_tape: bool = False
    makes_data: bool = False
    validates: bool = False
    short: int = 0
    together: int = 1
    is_divided: bool = False
    has_tables: bool = False
    dtype: str | None = None


KINDS = (
    Kind(),
    Kind(has_tables=True, is_divided=True, together=2),
    Kind(makes_data=True, has_tables=True, short=1),
    Kind(makes_data=True, validates=True, dtype="bfloat16"),
    Kind(has_tape=True, together=2, is_divided=True),
    Kind(has_tape=True, makes_data=True, short=1),
    Kind("adam", has_tables=True, dtype="bfloat16"),
)


class Fits(Trainings):
    """A cluster whose chief calls `fit`."""

    def __init__(self, world, plan, folder):
        super().__init__(world, plan, folder)
        kinds = [kind for kind in KINDS if plan.chiefs == 1 or not kind.makes_data]
        self.kind = kind = world.pick(kinds, SETTING)
        self.is_divided, self.has_tables, self.dtype = kind.is_divided, kind.has_tables, kind.dtype
        #: Batches of each worker; too few, perhaps.
        self.each = world.pick((BATCHES * EPOCHS, BATCHES * EPOCHS, 1), SETTING)
        self.changes, self.uses = world.choose(2, SETTING), world.choose(3, SETTING) == 1
        self.raises = world.pick(ERRORS, SETTING)
        leaves = world.pick((None, ("epoch", 0), ("batch", 1)), SETTING)
        self.leaves = leaves if plan.chiefs == 1 else None
        #: Epochs that have ended, and the weights then.
        self.backup = 0, None
        #: What the weights had before `fit`.
        self.base = np.zeros(ROWS)

    def model(self):
        """Return a model: a weight for each row, and a bias."""
        inputs = keras.Input((1,), dtype="int32")
        outputs = keras.layers.Embedding(ROWS, 1, embeddings_initializer="zeros", name="rows")(inputs)
        outputs = Shift()(keras.layers.Flatten(name="flat")(outputs))
        model = (TapeModel if self.kind.has_tape else keras.Model)(inputs, outputs, name="model")
        optimizer = {"sgd": keras.optimizers.SGD, "adam": keras.optimizers.Adam}[self.kind.optimizer](1.0)
        model.compile(optimizer, negative, metrics=[Count()], steps_per_execution=self.kind.together)
        return model

    def train(self, strategy):
        """Call `fit`, after an error once more, then `evaluate` and `predict`."""
        with strategy.scope():
            model = self.model()
        done, weights = self.backup
        if weights is not None:
            model.set_weights(weights)
        if self.kind.makes_data:
            self.fit_workers(model)
        else:
            self.fit_arrays(model, done)
        if self.uses:
            self.use(model)

    @property
    def is_exact(self):
        """Whether weights say how often each row counts."""
        return self.kind.optimizer == "sgd"

    # --- data of the chief ---------------------------------------------------------------------------

    def fit_arrays(self, model, done):
        """Train on the chief's data."""
        data = rows_of(0, BATCHES * SIZE, 0)
        if self.leaves is not None:
            self.fit_and_leave(model, data)
        self.base = self.counts(model) if self.leaves else self.base
        model.fit(*data, SIZE, EPOCHS, verbose=0, shuffle=False, initial_epoch=done, callbacks=[Own(self)])
        self.judge(model, EPOCHS)
        self.judge_steps(model, BATCHES * (EPOCHS - done))

    def judge_steps(self, model, expected):
        """Check the counts of steps, and of random numbers; more if `fit` was left before."""
        steps = int(model.optimizer.iterations.numpy())
        draws = int(model.get_layer("shift").seeds.state.numpy()[1])
        for what, found in (("An optimizer", steps), ("A random generator", draws)):
            self.world.check(
                found >= expected if self.leaves else found == expected,
                lambda what=what, found=found: f"{what} counts each of {expected} steps: {found}.",
            )

    def fit_and_leave(self, model, data):
        """Call `fit`, which a callback leaves."""
        error = None
        try:
            model.fit(*data, SIZE, EPOCHS, verbose=0, shuffle=False, callbacks=[Own(self, self.leaves)])
        except (ValueError, KeyboardInterrupt) as raised:
            error = raised
        self.world.check(error is self.raises, lambda: f"The callback's error is raised: {error!r}")
        counts = self.counts(model)
        if self.is_exact:
            self.world.check(
                set(counts.tolist()) <= {0, 1}, lambda: f"Each row counts once: {counts.tolist()}"
            )
            # What was scheduled before an error runs on, and is dropped by an interrupt.
            first = SIZE * (BATCHES if self.leaves[0] == "epoch" else 1)
            has_run = counts[:first].all() or (self.leaves[0] == "batch" and error is not ERRORS[0])
            self.world.check(has_run, lambda: f"Steps before the error count: {counts.tolist()}")

    def look_at(self, model, epochs, logs):
        """Look at the weights at the end of an epoch."""
        world = self.world
        world.check(
            logs["count"] == BATCHES, lambda: f"A metric counts each of {BATCHES} batches: {logs['count']}."
        )
        if self.kind.makes_data:
            return
        self.judge(model, epochs)
        if self.changes:
            layer = model.get_layer("shift")
            layer.bias.assign(layer.bias.numpy() + _MORE)
        if self.plan.chiefs > 1:
            self.backup = epochs, model.get_weights()

    def counts(self, model):
        """Return how often each row counts."""
        return model.get_layer("rows").get_weights()[0][:, 0]

    def judge(self, model, epochs):
        """Check how often each row counts."""
        if not self.is_exact:
            return
        counts = (self.counts(model) - self.base)[: BATCHES * SIZE]
        self.world.check(
            (counts == epochs).all(),
            lambda: f"Each row counts once in each of {epochs} epochs: {counts.tolist()}.",
        )

    # --- data of the workers -------------------------------------------------------------------------

    def fit_workers(self, model):
        """Train on data that workers make."""
        make = functools.partial(batches_of, self.each, self.kind.short)
        # Each validation begins with the first batch again.
        other = functools.partial(batches_of, 1, 0)
        options = {"validation_data": other, "validation_steps": 1} if self.kind.validates else {}
        error = None
        used = EPOCHS * BATCHES
        try:
            model.fit(
                make, epochs=EPOCHS, steps_per_epoch=BATCHES, verbose=0, callbacks=[Own(self)], **options
            )
        except OutOfRangeError as raised:
            error = raised
        have = self.each * self.plan.workers
        if error is not None:
            self.world.check(self.each < EPOCHS * BATCHES, lambda: f"No data end: {error!r}.")
        if error is None and self.leaves is None:
            self.judge_steps(model, used)
        counts = self.counts(model)
        self.world.check(
            set(counts.tolist()) <= {0, 1}, lambda: f"A batch is used once at most: {counts.tolist()}"
        )
        batches = counts[: have * SIZE].reshape(self.plan.workers, self.each, SIZE).any(-1)
        total = int(batches.sum())
        self.world.check(
            total == used if error is None else total <= have,
            lambda: f"{used} steps have used {total} batches: {batches.tolist()}",
        )
        if self.plan.servers > 1:
            # A closure that ran twice may have other batches on other servers.
            return
        for worker, own in enumerate(batches):
            self.world.check(
                own[: own.sum()].all(), lambda worker=worker, own=own: f"Worker {worker} used {own.tolist()}."
            )

    # --- after training ------------------------------------------------------------------------------

    def use(self, model):
        """Evaluate and predict."""
        weights = self.counts(model)[: BATCHES * SIZE] + model.get_layer("shift").bias.numpy()[0]
        x, y = rows_of(0, BATCHES * SIZE, 0)
        logs = model.evaluate(x, y, SIZE, verbose=0, return_dict=True)
        self.world.check(logs["count"] == BATCHES, lambda: f"`evaluate` counts batches: {logs}.")
        found = model.predict(x, SIZE, verbose=0)[:, 0]
        self.world.check(
            np.array_equal(found, weights), lambda: f"`predict` sees all steps: {found}, {weights}."
        )


def fits(world):
    """A chief trains a Keras model; workers are killed, and started again."""
    plan = Plan(servers=1 + world.choose(2, SETTING), workers=1 + world.choose(3, SETTING))
    run_servers(world, plan, Fits)


def fits_and_restarts(world):
    """Servers, workers and the chief are killed, and started again; the chief goes on from its backup."""
    plan = Plan(
        servers=1 + world.choose(2, SETTING), workers=2, chiefs=1 + world.choose(2, SETTING), durable=True
    )
    run_servers(world, plan, Fits)


# Processes that search it are forked before.
fits.runs_jax = fits_and_restarts.runs_jax = True
PROTOCOLS = {"fits": fits, "fits_and_restarts": fits_and_restarts}
