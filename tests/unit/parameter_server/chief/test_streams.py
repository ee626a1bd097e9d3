"""States of random generators for the runs of a program."""

import keras
import numpy as np

from unisono.parameter_server.chief._streams import RandomStream, RandomStreams
from unisono.step._keras_internals import store_value


def stream():
    generator = keras.random.SeedGenerator(7)
    return RandomStream(generator.state, np.array([0, 3], np.uint32))


def test_each_run_gets_the_next_state():
    one = stream()
    first = np.asarray(one.variable.value)
    streams = RandomStreams()
    taken = [streams.take([one])[0] for _ in range(3)]
    assert [(state - first).tolist() for state in taken] == [[0, 0], [0, 3], [0, 6]]
    assert (np.asarray(one.variable.value) - first).tolist() == [0, 9]


def test_a_seed_that_was_assigned_counts():
    one = stream()
    streams = RandomStreams()
    streams.take([one])
    one.variable.assign(np.array([1, 100], np.uint32))
    assert streams.take([one])[0].tolist() == [1, 100]
    assert streams.take([one])[0].tolist() == [1, 103]


def test_while_the_variable_is_empty_the_state_is_that_of_the_loop():
    one = stream()
    streams = RandomStreams()
    carried = one.variable.value
    store_value(one.variable, None)
    streams.follow(one.variable, carried)
    assert streams.take([one])[0].tolist() == np.asarray(carried).tolist()
    following = streams.held(one.variable)
    streams.follow(one.variable, following)
    assert streams.take([one])[0].tolist() == np.asarray(following).tolist()
    # A callback may have put another one there.
    streams.follow(one.variable, np.array([5, 5], np.uint32))
    assert streams.take([one])[0].tolist() == [5, 5]


def test_calls_that_wait_at_the_end_of_an_epoch_do_not_get_older_states():
    one = stream()
    first = one.variable.value
    streams = RandomStreams()
    with streams.ahead():
        store_value(one.variable, None)
        streams.follow(one.variable, first)
        taken = [streams.take([one])[0]]
        # Keras' loop has ended, and two calls are sent later.
        store_value(one.variable, first)
        taken += [streams.take([one])[0] for _ in range(2)]
    assert [(state - np.asarray(first)).tolist() for state in taken] == [[0, 0], [0, 3], [0, 6]]
    assert (np.asarray(one.variable.value) - np.asarray(first)).tolist() == [0, 9]
