"""Tables of what an evaluator does next, with a clock that is an argument."""

import pytest

from unisono.evaluator._checkpoint_selection import (
    CheckpointEntry,
    Evaluate,
    Finish,
    FinishReason,
    View,
    Wait,
    in_order,
    next_action,
    signatures,
)


def commit(number, time_ns=None, signature="s", series="ckpt-"):
    return CheckpointEntry(
        f"{series}{number}", series, number, number if time_ns is None else time_ns, signature, True
    )


def file(name, time_ns, signature="s"):
    return CheckpointEntry(name, name, None, time_ns, signature, False)


def action(*found, known=(), before=(), most=None, timeout=60.0, **seen):
    view = View(found, signatures(known), signatures(before), **seen)
    return next_action(view, most, timeout)


ONE, TWO, THREE = commit(1), commit(2), commit(3)


@pytest.mark.parametrize(
    ("found", "known", "chosen", "overtaken"),
    [
        ([ONE], [], ONE, []),
        ([ONE, TWO, THREE], [], THREE, [ONE, TWO]),
        ([TWO, THREE], [TWO], THREE, []),
        # The newest was damaged, and is known: the one before serves.
        ([ONE, TWO, THREE], [ONE, THREE], TWO, []),
        # Something else under a name that is known.
        ([ONE, commit(2, 9, "other")], [ONE, TWO], commit(2, 9, "other"), []),
        # A directory that was copied without its times.
        ([commit(10, 5), commit(9, 7)], [], commit(10, 5), [commit(9, 7)]),
        # Two series: the later one.
        ([commit(7, 1, series="backup-"), commit(2, 5)], [], commit(2, 5), [commit(7, 1, series="backup-")]),
        # A run began anew in the same directory.
        ([commit(5, 1), commit(1, 9)], [commit(5, 1)], commit(1, 9), []),
    ],
)
def test_the_newest_that_is_not_known_comes_first(found, known, chosen, overtaken):
    assert action(*found, known=known) == Evaluate(chosen, tuple(overtaken))


@pytest.mark.parametrize("found", [[], [ONE], [ONE, TWO]])
def test_nothing_new_is_waited_for(found):
    assert isinstance(action(*found, known=found, idle=59.0), Wait)


def test_files_are_taken_when_they_have_stopped_to_change():
    small, large = file("a.keras", 1, "1"), file("a.keras", 2, "2")
    assert isinstance(action(small), Wait)
    assert isinstance(action(large, before=[small]), Wait)
    assert action(large, before=[large]) == Evaluate(large)
    # At the end of training nobody writes any more.
    assert action(large, over=True) == Evaluate(large)


def test_a_complete_file_is_taken_while_the_next_is_written():
    first, second, third = (file(f"{i}.keras", i) for i in range(3))
    found = [first, second, third]
    assert action(*found, before=found[:2]) == Evaluate(second, (first,))


def test_files_are_in_the_order_of_their_times():
    assert [f.name for f in in_order([file("a", 3), file("b", 1), file("c", 2)])] == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        ({"asked": True}, FinishReason.ASKED),
        ({"most": 2, "evaluations": 2}, FinishReason.ENOUGH),
    ],
)
def test_what_ends_it_although_there_is_something_new(seen, reason):
    assert action(ONE, **seen) == Finish(reason)


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        ({"over": True}, FinishReason.FINISHED),
        ({"idle": 60.0}, FinishReason.TIMEOUT),
        ({"over": True, "idle": 60.0}, FinishReason.FINISHED),
    ],
)
def test_what_ends_it_when_nothing_is_new(seen, reason):
    assert action(ONE, known=[ONE], **seen) == Finish(reason)
    assert action(ONE, TWO, known=[ONE], **seen) == Evaluate(TWO)


def test_fewer_evaluations_than_wanted_go_on():
    assert action(ONE, most=2, evaluations=1) == Evaluate(ONE)
    assert isinstance(action(most=2, evaluations=1, timeout=float("inf"), idle=1e9), Wait)
