"""Named steps on parameter servers, as an Estimator runs them, with data that workers make.

Real: `RemoteStepRunner` and what `protocol_fits` has. A step adds one at the place of its element. Promised,
and checked:

- no element is used twice, and none is left out before a later one of the same worker;
- as many steps have run as `run` says, and as losses were given; values are those of the last step;
- training ends when no worker has data, or when those that are away stay away;
- after training the chief has the variables, and a later training goes on with them.

Tests: tests/unit/test_simulated_trainings.py.
"""

import functools

import keras
import numpy as np

from tests.simulation._trainings import Trainings
from tests.simulation._world import SETTING
from tests.simulation.protocol_servers import Plan, run_servers
from unisono._values import Mirrored

#: Elements of each worker at most.
MOST = 6
WORKERS = 3
#: Faults that keep no worker away for long.
_HARMLESS = {"loss", "repeat", "late", "wall"}


def elements_of(counts, context, group):
    """Return the elements of a worker: its places."""
    worker = context.input_pipeline_id
    for number in range(counts[worker]):
        place = worker * MOST + number
        # The last one is longer.
        yield np.full(1 + (number == MOST - 1), place, "int32"), np.ones(1, "float32")


class CountStep:
    """A step that counts its element, and draws a number."""

    scalars = frozenset({"loss", "place"})
    shared_errors = ()

    def __init__(self):
        self.taken = keras.Variable(np.zeros(WORKERS * MOST, "float32"), trainable=False, name="taken")
        self.seeds = keras.random.SeedGenerator(3)

    def create(self, element):
        """Run it the first time."""
        return self._run(element, self.scalars)

    def returning(self, names):
        """Return the step, which returns named values."""
        return lambda element: self._run(element, names)

    def _run(self, element, names):
        places, ones = element
        one_hot = keras.ops.one_hot(places[0], WORKERS * MOST)
        self.taken.assign(self.taken + one_hot)
        drawn = keras.random.uniform((), seed=self.seeds)
        values = {"loss": ones[0] + 0.0 * drawn, "place": places[0], "row": one_hot}
        return Mirrored({name: values[name] for name in names})


class NamedSteps(Trainings):
    """A cluster whose chief runs named steps."""

    def __init__(self, world, plan, folder):
        super().__init__(world, plan, folder)
        self.is_divided = world.choose(2, SETTING) == 1
        self.counts = [world.pick((3, MOST, 0), SETTING) for _ in range(WORKERS)]
        self.group = world.pick((2, 5), SETTING)
        self.most = world.pick((30, 4), SETTING)
        self.trainings = world.pick((1, 2), SETTING)

    def train(self, strategy):
        """Train on the workers' data, once or twice."""
        with strategy.scope():
            step = CountStep()
        before, total = np.zeros(WORKERS * MOST), 0
        for _ in range(self.trainings):
            done, is_over = self.train_once(strategy, step)
            after = np.asarray(step.taken)
            self.judge(after - before, done, is_over)
            before, total = after, total + done
        draws = int(np.asarray(step.seeds.state)[1])
        if self.plan.workers == 1:
            # Of several workers one may have ended before the others.
            self.world.check(draws == total, lambda: f"{total} steps have drawn {draws} numbers.")

    def train_once(self, strategy, step):
        """Train; return how many steps have run, and whether the data have ended."""
        world = self.world
        source = functools.partial(elements_of, tuple(self.counts))
        runner = strategy.make_step_runner(step, source)
        done, losses, is_over = 0, [], False
        before = float(np.asarray(step.taken).sum())
        with runner.around_training():
            is_over = not runner.create_variables()
            world.check(
                is_over == (not any(self.counts[: self.plan.workers])), "Whether there are data is known."
            )
            while done < self.most and not is_over:
                wanted = min(self.group, self.most - done)
                count, values = runner.run(wanted, ["row"] if world.choose(2) else [], losses)
                done += count
                is_over = count < wanted
                if count and "row" in values:
                    place, row = int(values["place"]), np.asarray(values["row"])
                    world.check(
                        row[place] == 1 and row.sum() == 1, lambda row=row: f"Values of one step: {row}."
                    )
                found = float(np.asarray(step.taken).sum()) - before if world.choose(2) else done
                world.check(found == done, f"{done} steps have counted {found}.")
        world.check(len(losses) == done, lambda: f"{done} steps have given {len(losses)} losses.")
        return done, is_over

    def judge(self, taken, done, is_over):
        """Check which elements were used."""
        world = self.world
        world.check(set(taken.tolist()) <= {0, 1}, lambda: f"An element is used once at most: {taken}.")
        world.check(taken.sum() == done, lambda: f"{done} steps have used {taken.sum()} elements.")
        for worker, own in enumerate(taken.reshape(WORKERS, MOST)):
            used = int(own.sum())
            world.check(own[:used].all(), lambda worker=worker, own=own: f"Worker {worker} used {own}.")
            if is_over and worker < self.plan.workers and set(world.faults) <= _HARMLESS:
                world.check(
                    used == self.counts[worker],
                    lambda worker=worker, used=used: (
                        f"Worker {worker} used {used} elements of {self.counts}."
                    ),
                )


def named_steps(world):
    """A chief runs named steps; workers are killed, and started again."""
    run_servers(
        world,
        Plan(servers=1 + world.choose(2, SETTING), workers=1 + world.choose(WORKERS, SETTING)),
        NamedSteps,
    )


# Processes that search it are forked before.
named_steps.runs_jax = True
PROTOCOLS = {"named_steps": named_steps}
