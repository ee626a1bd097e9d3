"""What many tasks cost the chief: messages, bytes and operations for each task do not grow with their number.

Counts alone: the stand-ins of `benchmarks/many_tasks.py` do with the chief what tasks do, over real sockets.
"""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import many_tasks

import unisono
from unisono.cluster._program_digest import cluster_text
from unisono.cluster.rendezvous import _protocol
from unisono.cluster_resolver._spec import Task
from unisono.launcher._options import LaunchOptions
from unisono.launcher._plan import RunPaths, make_plan
from unisono.parameter_server.chief import _closures
from unisono.rpc._transport._client_thread import acquire_thread, release_thread

FOLDER = str(Path(unisono.__file__).parent)


@pytest.fixture
def without_rosters(monkeypatch, tuned):
    """Rosters go out by the clock: here only the first one does, and the one that answers a hello."""
    monkeypatch.setattr("unisono.cluster.rendezvous._server._ROSTER_SECONDS", many_tasks.LIMIT)
    tuned(many_tasks, WAITS=0.0, APART=0.0)


@pytest.mark.usefixtures("without_rosters")
@pytest.mark.parametrize("count", [20, 60])
def test_the_chief_has_a_few_messages_for_each_task(count):
    phases, board = many_tasks.control_plane(count)
    others = count - 1
    arrival, introduction, check, _, end = (phase.counts for phase in phases)
    # A hello; a roster and the start, and once a roster for those that are there.
    assert arrival["received"] == others
    assert 2 * others <= arrival["sent"] <= 3 * others
    # A list of sixteen, however many there are.
    assert arrival["bytes"] <= 5000 * others
    # Each asks the chief once and is asked by it.
    assert introduction["messages"] == 4 * others
    assert introduction["asked"] == check["asked"] == others
    # The chief asks where each is, and says that all are there; the others wait for that.
    assert end["asked"] == 2 * others
    # Each posts twice and reads what process 0 has put together; nothing is read by each of each.
    assert board[0] == 2 * count + 4
    assert {board[i] for i in range(1, count)} == {4}


def test_the_text_of_a_cluster_has_a_bounded_length_and_shows_where_it_differs():
    tasks = [f"10.0.{i // 256}.{i % 256}:2222" for i in range(1024)]
    text = cluster_text({"chief": ["a:1"], "worker": tasks})
    assert len(text) < 1000
    other = cluster_text({"chief": ["a:1"], "worker": [*tasks[:700], "b:1", *tasks[701:]]})
    lines = zip(text.split("\n"), other.split("\n"), strict=True)
    (differing,) = [a for a, b in lines if a != b]
    assert differing.startswith("worker:649 to worker:713: addresses of digest ")
    assert cluster_text({"worker": {3: "a:1"}}) == "{'worker': {3: 'a:1'}}"


def test_a_chief_has_connections_to_thousands_of_tasks():
    thread = acquire_thread()
    try:
        assert thread.context.max_sockets >= 3 * 4096
    finally:
        release_thread(thread)


def operations(function):
    """How many operations of the interpreter a call runs in the library."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def meet(count):
    """All processes of a cluster come; process 0 decides about each, and in the end about all."""
    members = [_protocol.Member(i, f"h{i}", i, f"t{i}", {"generation": 1, "jax": "1"}) for i in range(count)]
    state = _protocol.open_rendezvous(members[0], count, [f"h{i}:1" for i in range(count)], 60.0, 0.0)
    for member in members[1:]:
        state = _protocol.admit(state, member).state
        _protocol.roster(state)
        assert _protocol.outcome(state, 1.0) is None or member is members[-1]
    assert _protocol.outcome(state, 1.0) == _protocol.Proceed()


def plan(count):
    """A launch plans its tasks."""
    path = RunPaths(Path("/nowhere"))
    made = make_plan(LaunchOptions(workers=count), 0, count, range(10_000, 10_000 + count), path)
    assert made.gpus_of(Task("worker", count - 1)) == ()


@pytest.mark.parametrize("what", [meet, plan])
def test_no_work_of_the_chief_is_done_for_each_pair_of_tasks(what):
    few, many = operations(lambda: what(50)), operations(lambda: what(200))
    assert many <= 4.5 * few


def test_a_closure_costs_the_chief_no_look_at_each_pair_of_worker_and_closure():
    def one(workers):
        state = _closures.Closures.of_generation(0, range(workers))
        for _ in range(40 * workers):
            state, _ = _closures.schedule(state)
        rules = _closures.Rules(together=1)
        while (following := _closures.start(state, rules)) is not None:
            state = following
        assert len(state.running) == 2 * workers

        def turn():
            begun = _closures.start(_closures.finish(state, 0), rules)
            assert begun is not None
            assert _closures.start(begun, rules) is None

        return operations(turn)

    few, many = one(10), one(40)
    assert many <= 4.5 * few
