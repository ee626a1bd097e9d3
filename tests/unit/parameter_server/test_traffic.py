"""Counts of what steps cost, from the messages that exist."""

from concurrent.futures import Future

import numpy as np
import pytest

from unisono.parameter_server.server._traffic import StepCosts, StepTally, Traffic
from unisono.rpc._frames import Frame
from unisono.rpc._ops import Op

#: Of data, pull, compute and push.
NO_SECONDS = [0.0] * 4


def answered(meta, arrays=()):
    done = Future()
    done.set_result(Frame(Op.OK, 1, 0, meta, arrays))
    return done


def test_bytes_and_missed_updates_of_one_step():
    traffic = Traffic()
    traffic.sent(0, Op.PULL, [])(answered({"count": 5}, [np.zeros(10, "float32")]))
    push = traffic.sent(0, Op.PUSH, [np.zeros(3, "float32")])
    # Two pushes of others came between the pull and this one.
    push(answered({"applied": True, "count": 8}))
    assert traffic.take() == [40, 12, 1, 2, 2, 1, *NO_SECONDS]
    assert traffic.take() == [0, 0, 0, 0, 0, 1, *NO_SECONDS]


def test_values_that_come_with_a_push_are_where_the_next_step_begins():
    traffic = Traffic()
    traffic.sent(1, Op.PULL, [])(answered({"count": 0}))
    first = traffic.sent(1, Op.PUSH, [])
    first(answered({"applied": True, "count": 1, "pulled": {"count": 4}}, [np.zeros(2)]))
    traffic.sent(1, Op.PUSH, [])(answered({"applied": True, "count": 5}))
    costs = StepCosts(*traffic.take())
    assert (costs.pulled, costs.updates, costs.missed) == (16, 2, 0)


def test_what_failed_or_was_repeated_is_no_update():
    traffic, failed = Traffic(), Future()
    failed.set_exception(ValueError("no answer"))
    traffic.sent(0, Op.PULL, [])(answered({"count": 5}))
    traffic.sent(0, Op.PUSH, [])(failed)
    traffic.sent(0, Op.PUSH, [])(answered({"applied": False, "count": 9}))
    # Nothing was pulled from the second server.
    traffic.sent(1, Op.PUSH, [])(answered({"applied": True, "count": 9}))
    assert traffic.take() == [0, 0, 0, 0, 0, 1, *NO_SECONDS]


def test_a_tally_is_by_worker_and_begins_again():
    tally = StepTally()
    tally.add(1, [1_000_000, 500_000, 2, 3, 3, 1, 0.0, 0.5, 1.0, 0.0])
    tally.add(0, [0, 0, 1, 0, 0, 1, *NO_SECONDS])
    tally.add(1, [0, 0, 2, 1, 1, 1, 0.0, 0.5, 0.0, 3.0])
    taken = tally.take()
    assert list(taken) == [0, 1]
    assert taken[1].steps == 2
    expected = {"staleness": 1.0, "staleness_max": 3.0, "pulled_mb": 1.0, "pushed_mb": 0.5}
    expected |= {"data_ms": 0.0, "pull_ms": 500.0, "compute_ms": 500.0, "push_ms": 1500.0}
    assert taken[1].numbers == expected
    assert tally.take() == {}
    assert StepCosts().numbers["staleness"] == 0.0


def test_the_seconds_of_a_block_count_also_where_it_raises():
    traffic = Traffic()
    with pytest.raises(KeyError), traffic.spending("pull"):
        raise KeyError
    traffic.spent("push", 2.0)
    costs = StepCosts(*traffic.take())
    assert costs.pull > 0 == costs.compute
    assert costs.push == 2.0
