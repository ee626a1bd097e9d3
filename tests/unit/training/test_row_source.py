"""Rows of several workers: what one of them begins alone all do, and processes of a replica have the same."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from unisono._errors import ClusterError, InvalidArgumentError
from unisono.training.named_steps._rows import ReplicaParts, Row, RowSource


class Exchange:
    """Lets threads gather, as processes do."""

    def __init__(self, size):
        self.size, self._barrier, self._data = size, threading.Barrier(size), [b""] * size

    def group(self, index, together=1):
        def gather(data):
            self._data[index] = data
            self._barrier.wait(10)
            every = list(self._data)
            self._barrier.wait(10)
            return every[::together]

        return SimpleNamespace(size=self.size // together, gather=gather, together=together)


def source_of(exchange, index, numbers, together=1):
    rows = (Row((ReplicaParts([np.full(2, n, "f4")]),), False) for n in numbers)
    readers = exchange.group(index, together)
    return RowSource(rows, exchange.group(index), (KeyError,), readers if together > 1 else None)


def both(*calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        return [f.result() for f in [pool.submit(call) for call in calls]]


def take(source):
    rows, _ = source.take(lambda row: 1, frozenset())
    return [int(row.batch[0][0][0]) for row in rows]


@pytest.mark.parametrize("at_end", [False, True])
def test_what_one_worker_begins_the_others_do_where_they_wait(at_end):
    exchange, done = Exchange(2), []
    sources = [source_of(exchange, i, range(3)) for i in range(2)]
    saves = [source.sharing(lambda i=i: done.append(i) or i) for i, source in enumerate(sources)]

    def chief():
        assert saves[0]() == 0
        found = [] if at_end else take(sources[0])
        sources[0].wait_for_all()
        return found

    def other():
        found = [] if at_end else take(sources[1])
        sources[1].wait_for_all()
        return found

    assert both(chief, other) == [[] if at_end else [0]] * 2
    assert sorted(done) == [0, 1]


def test_workers_that_begin_together_do_it_once():
    exchange, done = Exchange(2), []
    sources = [source_of(exchange, i, range(3)) for i in range(2)]
    saves = [source.sharing(lambda i=i: done.append(i)) for i, source in enumerate(sources)]
    both(*saves)
    assert sorted(done) == [0, 1]
    assert both(*(lambda s=s: take(s) for s in sources)) == [[0], [0]]


@pytest.mark.parametrize("error", [KeyError("shared"), ValueError("own")])
def test_an_error_of_another_worker_is_raised_in_place_of_the_action(error):
    exchange, done = Exchange(2), []
    sources = [source_of(exchange, i, range(3)) for i in range(2)]
    save = sources[0].sharing(lambda: done.append(0))
    sources[1].sharing(lambda: done.append(1))
    with pytest.raises(KeyError if isinstance(error, KeyError) else ClusterError, match=str(error.args[0])):
        both(save, lambda: sources[1].stop(error))
    assert not done


def test_processes_of_a_replica_have_the_same_rows():
    exchange = Exchange(4)
    same = [source_of(exchange, i, [i // 2, 7], together=2) for i in range(4)]
    assert both(*(lambda s=s: take(s) for s in same)) == [[0], [0], [1], [1]]
    other = [source_of(exchange, i, [i], together=2) for i in range(4)]

    def failing(source):
        with pytest.raises(InvalidArgumentError, match="other ones on worker 1 than on worker 0"):
            take(source)

    both(*(lambda s=s: failing(s) for s in other))
    shorter = [source_of(exchange, i, [5] * (i != 3), together=2) for i in range(4)]

    def ending(source):
        with pytest.raises(InvalidArgumentError, match="other ones on worker 3 than on worker 2"):
            take(source)

    both(*(lambda s=s: ending(s) for s in shorter))
