"""What `LocalUpdates` has to compute, in a few lines of NumPy that know of all replicas at once.

Tests: tests/unit/test_simulated_local.py.
"""

import copy
import dataclasses

import numpy as np

#: Weights by fragments of equal bytes, and how what is not a weight becomes one.
WEIGHTS = ("w0", "w1", "w2", "w3")
MEAN, SUM, FIRST = "statistic", "metric", "counter"
OTHERS = (MEAN, SUM, FIRST)


class Outer:
    """An outer optimizer: SGD with momentum. Its state is one array for each weight."""

    def stateless_apply(self, values, gradients, weights):
        new = [np.float32(0.5) * v + g for v, g in zip(values, gradients, strict=True)]
        return [w - np.float32(0.75) * v for w, v in zip(weights, new, strict=True)], new


def taken_step(values, slot, replica, number):
    """Return what a replica has after a step of its own, and its slot."""
    share = np.float32((37 * replica + 101 * number + 11) % 64) / 64
    slot = np.float32(0.5) * slot + share
    new = {}
    for i, name in enumerate(WEIGHTS):
        new[name] = values[name] - (np.float32(0.25) * slot + np.float32(0.125 * (i + 1)) * values[name])
    new[MEAN] = np.float32(0.75) * values[MEAN] + np.float32(0.25) * share
    new[SUM] = values[SUM] + share
    new[FIRST] = values[FIRST] + 1
    return new, slot


@dataclasses.dataclass
class _Sent:
    number: int
    at: int
    trained: int
    sums: dict
    rows: dict


class Twin:
    """All replicas after some steps.

    Args:
        sync: the `LocalUpdates`.
        fragments: the names of each fragment's weights.
        has_outer: whether there are outer optimizers.
        size: the number of replicas.
    """

    def __init__(self, sync, fragments, has_outer, size):
        self.sync, self.fragments, self.size = sync, fragments, size
        self.outer = Outer() if has_outer else None
        self.shared = {name: np.full(2, i + 1, np.float32) for i, name in enumerate(WEIGHTS)}
        self.shared |= {
            MEAN: np.zeros(1, np.float32),
            SUM: np.zeros(1, np.float32),
            FIRST: np.zeros(1, np.int32),
        }
        self.slots = [np.float32(0)] * size
        self.outer_values = [[np.zeros(2, np.float32) for _ in names] for names in fragments]
        self.steps = 0
        self._begin()

    def _begin(self):
        self.done, self.trained, self.running = 0, [0] * len(self.fragments), []
        self.rows = [{name: self._begun(name, r) for name in self.shared} for r in range(self.size)]

    def _begun(self, name, replica):
        value = self.shared[name]
        return np.zeros_like(value) if name == SUM and replica else value

    def copy(self):
        """Return another one."""
        # Arrays are never changed in place.
        new = copy.copy(self)
        new.shared, new.rows = dict(self.shared), [dict(rows) for rows in self.rows]
        new.slots, new.trained, new.running = list(self.slots), list(self.trained), list(self.running)
        new.outer_values = list(self.outer_values)
        return new

    def step(self):
        """Let all take a step."""
        for r in range(self.size):
            self.rows[r], self.slots[r] = taken_step(self.rows[r], self.slots[r], r, self.steps)
        self.steps += 1
        if self.size == 1:
            self.shared = dict(self.rows[0])
            return
        self.done += 1
        self.trained = [each + 1 for each in self.trained]
        while self.running and self.running[0].at + self.sync.overlap == self.steps:
            self._apply(self.running.pop(0))
        for number, end in enumerate(self.sync._ends):
            if end == self.done:
                sent = self._sent(number)
                self.trained[number] = 0
                if self.sync.overlap:
                    self.running.append(sent)
                else:
                    self._apply(sent)
        self.done %= self.sync.every

    def end(self):
        """End a phase that has fewer steps, as at the end of an epoch."""
        if self.size == 1:
            return
        while self.running:
            self._apply(self.running.pop(0))
        for number, trained in enumerate(self.trained):
            if trained:
                self._apply(self._sent(number))
        self.trained, self.done = [0] * len(self.fragments), 0

    def set_weight(self, name, value):
        """Give a weight another value, as a callback does."""
        for sent in self.running:
            self.trained[sent.number] += sent.trained
        self.running = []
        self.shared[name] = value
        for rows in self.rows:
            rows[name] = value
        if self.size == 1:
            self.rows[0][name] = value

    def resized(self, size):
        """Return what another number of replicas continues from."""
        new = self.copy()
        new.end()
        new.size, new.slots = size, [new.slots[r % self.size] for r in range(size)]
        new._begin()
        return new

    def _names(self, number):
        is_last = number == len(self.fragments) - 1
        return (*self.fragments[number], *(OTHERS if is_last else ()))

    def _sent(self, number):
        rows = [{name: each[name] for name in self._names(number)} for each in self.rows]
        sums = {}
        for name in rows[0]:
            own = [each[name] for each in rows]
            if name in WEIGHTS and self.outer is not None:
                own = [self.shared[name] - x for x in own]
            sums[name] = own[0] if name == FIRST else sum(own[1:], own[0])
        return _Sent(number, self.steps, self.trained[number], sums, rows)

    def _apply(self, sent):
        names = self.fragments[sent.number]
        means = {n: (sent.sums[n] / self.size).astype(np.float32) for n in sent.sums if n in (*names, MEAN)}
        if self.outer is not None:
            values = self.outer_values[sent.number]
            weights = [self.shared[n] for n in names]
            new, self.outer_values[sent.number] = self.outer.stateless_apply(
                values, [means[n] for n in names], weights
            )
            means |= dict(zip(names, new, strict=True))
        for name in sent.sums:
            self.shared[name] = means.get(name, sent.sums[name])
        for r, rows in enumerate(self.rows):
            for name in sent.sums:
                rows[name] = self._begun(name, r) + (rows[name] - sent.rows[r][name])
