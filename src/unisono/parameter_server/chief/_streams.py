"""The states of random generators, which the chief gives to each run.

Tests: tests/unit/parameter_server/chief/test_streams.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono.step._keras_internals import store_value, stored_value


@dataclasses.dataclass(frozen=True)
class RandomStream:
    """A random generator of a program, whose state the chief holds and gives to each run.

    No two runs get the same state, and a run that is repeated gets the same again. With one worker the
    states are those that one device would have.

    Args:
        increment: what one run adds to it, modulo 2**32.
    """

    variable: keras.Variable
    increment: np.ndarray

    def advanced(self, state: np.ndarray) -> np.ndarray:
        """Return the state for the run after the one that was given `state`."""
        advanced: np.ndarray = np.add(state, self.increment)
        return advanced


class RandomStreams:
    """The next state of each random generator of a job; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By `id` of a generator's variable: the variable, its next state, and the array that the variable
        #: holds.
        self._next: dict[int, tuple[keras.Variable, np.ndarray, jax.Array]] = {}
        self._is_ahead = False

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """Advance states when calls are sent, until the block ends, whatever the variables hold.

        Where workers take batches, calls are sent after Keras' loop has scheduled them. At the end of an
        epoch the loop fills the variables with states that do not count the calls which still wait. Within
        another such block, as in a validation, it goes on.
        """
        if self._is_ahead:
            yield
            return
        with self._lock:
            self._next.clear()
            self._is_ahead = True
        try:
            yield
        finally:
            with self._lock:
                self._is_ahead = False
            self.rest()

    def follow(self, variable: keras.Variable, value: jax.Array) -> None:
        """Note the state that Keras' loop carries, while the variable is empty."""
        with self._lock:
            if id(variable) not in self._next or self._next[id(variable)][2] is not value:
                self._next[id(variable)] = variable, np.asarray(value), value

    def knows(self, variable: keras.Variable) -> bool:
        """Return whether the state of a generator was noted."""
        return id(variable) in self._next

    def rest(self) -> None:
        """Put the states into the generators' variables, which Keras' loop has filled with older ones."""
        with self._lock:
            for variable, _, array in self._next.values():
                if stored_value(variable) is not None:
                    store_value(variable, array)

    def held(self, variable: keras.Variable) -> jax.Array:
        """Return the array of a generator's next state."""
        return self._next[id(variable)][2]

    def take(self, streams: Sequence[RandomStream]) -> list[np.ndarray]:
        """Return the states for one run, and advance the generators."""
        with self._lock:
            return [self._advance(stream) for stream in streams]

    def _advance(self, stream: RandomStream) -> np.ndarray:
        variable, held = stream.variable, stored_value(stream.variable)
        if self._is_ahead and id(variable) in self._next:
            held = None
        # While Keras' loop runs, the variable is empty. Else a program may have set another seed.
        state = np.asarray(held) if held is not None else self._next[id(variable)][1]
        following = stream.advanced(state)
        array = jnp.asarray(following)
        if held is not None:
            store_value(variable, array)
        self._next[id(variable)] = variable, following, array
        return state
