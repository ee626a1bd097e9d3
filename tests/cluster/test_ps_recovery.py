"""Real processes that are killed: what the benchmark of recovery runs, with one plan."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import ps_recovery
import pytest

from tests import forked
from tests.ps_history import HistoryError
from unisono.testing import FaultPlan

ps_recovery.start = lambda command, env, out: forked.Program(command[1:], Path.cwd(), out, env=env)

#: A worker and the chief are killed from outside, a server by itself: its update is in the log, not answered.
PLAN = ps_recovery.Plan(
    FaultPlan().kill("worker:1", 30).kill("chief:0", 70),
    (("ps:0", "before the answer", 50),),
    staleness=3,
    types=("bfloat16", "float16"),
)


def test_a_worker_a_server_and_the_chief_are_killed_and_each_update_counts_once():
    seen = {}

    def show(run):
        seen["restarted"] = [e["task"] for e in run.events("restart task")]
        for task in ps_recovery.WORKERS:
            types = run.notes(task, "types")
            pulled = {n["pulled"] for n in types if not n["pushed"]}
            seen[task] = pulled, "bfloat16" in types[-1]["pushed"]

    _, verdict = ps_recovery.outcome(PLAN, show)
    assert sorted(seen["restarted"]) == ["chief:0", "ps:0", "worker:1"]
    assert (verdict.lost, verdict.twice, verdict.skipped) == (0, 0, 0)
    # Restored servers and a restored checkpoint have the exact weights.
    assert seen["worker:0"] == seen["worker:1"] == ({"float16"}, True)
    assert verdict.stalest <= 3
    assert verdict.steps > 70


def note(kind, **fields):
    return {"kind": kind, "at": 0.0, **fields}


@pytest.mark.parametrize(
    ("found", "applied", "lost"),
    [
        # Killed after the note: the update was logged, or it was not; or the log was off.
        (3, [[1, 2, 3]], []),
        (2, [[1, 2]], []),
        (1, [[1]], [2]),
    ],
)
def test_a_server_s_notes_and_what_it_finds_again(found, applied, lost):
    notes = [note("recovered", number=0)]
    for closure in (1, 2):
        notes += [note("intent", closure=closure), note("apply", closure=closure)]
    notes += [note("intent", closure=3), note("recovered", number=found)]
    assert ps_recovery.applied_on(notes) == (applied, lost)
    # The next chief begins anew.
    notes += [note("reset"), note("intent", closure=9), note("apply", closure=9)]
    assert ps_recovery.applied_on(notes) == ([*applied, [9]], lost)


class Noted:
    """A run of one step, as the tasks have noted it."""

    kills = ()
    plan = ps_recovery.Plan(staleness=0)

    def __init__(self, folder, applied, value):
        self.folder, self.applied = folder, applied
        folder.joinpath("values.json").write_text(
            '{"done": 1, "values": [%s, %s], "trained": [1, 1]}' % (value, value)  # noqa: UP031
        )

    def events(self, kind):
        return []

    def notes(self, task, *kinds):
        every = {
            "chief:0": [
                note("starts", index=0),
                note("send", closure=5, index=0),
                note("acknowledge", closure=5, index=0),
            ],
            "worker:0": [note("run", closure=5)],
        }
        server = [
            n for _ in range(self.applied) for n in (note("intent", closure=5), note("apply", closure=5))
        ]
        return [
            n
            for n in every.get(task, server if task.startswith("ps") else [])
            if n["kind"] in kinds or not kinds
        ]


def test_the_judge_sees_what_is_lost_and_what_is_applied_twice(tmp_path):
    good = "[[1.0], [1.0, 0.0], [0.0, 0.0], [1.0, 0.0]]"
    verdict = ps_recovery.judge(Noted(tmp_path, 1, good))
    assert (verdict.lost, verdict.twice, verdict.repeated, verdict.skipped) == (0, 0, 0, 0)
    lost = ps_recovery.judge(Noted(tmp_path, 0, "[[0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]"))
    assert lost.lost == 2
    with pytest.raises(HistoryError, match="applied 2 times"):
        ps_recovery.judge(Noted(tmp_path, 2, good))
    with pytest.raises(HistoryError, match=r"ps:0 has counted 2\.0 of 1 steps"):
        ps_recovery.judge(Noted(tmp_path, 1, good.replace("[[1.0]", "[[2.0]")))
    again = ps_recovery.judge(Noted(tmp_path, 1, "[[1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 2.0]]"))
    assert (again.repeated, again.skipped) == (2, 0)
