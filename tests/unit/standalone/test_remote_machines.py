"""Servers as the machines of a launch: what happens where one of them refuses, or does not answer."""

import pytest

from unisono._errors import ClusterError, ContextError
from unisono.cluster_resolver._spec import Task
from unisono.launcher._options import LaunchOptions
from unisono.launcher._plan import RunPaths
from unisono.launcher._restart_policy import Failure
from unisono.rpc._calls import PeerLostError
from unisono.standalone._link import Claim, RequestRefusedError, ServerInfo, ServerLink
from unisono.standalone._remote_machines import RemoteMachines, RemoteProgram, ServerAccess, ServerTimeouts
from unisono.standalone._slots import Slots


class Link:
    """A server; each of its answers is an error, as long as it has one."""

    is_live, reached_at, losses, refusal = True, "a:1", frozenset(), ""

    def __init__(self, *errors):
        self.errors, self.files, self.claims = list(errors), [], 0

    def _answer(self):
        if self.errors:
            raise self.errors.pop(0)

    def claim(self, timeout):
        self.claims += 1
        self._answer()

    def is_refused(self):
        return True

    def ports(self, count, avoid):
        self._answer()
        return list(range(7000, 7000 + count))

    def put(self, name, data):
        self._answer()
        self.files.append((name, data))


def lost():
    return PeerLostError("the connection was lost", Task("server", 0), "a:1", 1.0)


def machines(root, link, **timeouts):
    slots = Slots.of({"worker": ["a:1"], "evaluator": ["a:1"]})
    options = LaunchOptions(workers=1, evaluator=True)
    program = RemoteProgram({}, lambda paths, task: {})
    said = []
    made = RemoteMachines(
        slots, {"a:1": link}, options, RunPaths(root), program, said.append, ServerTimeouts(**timeouts),
        ServerAccess(lambda address: None),
    )  # fmt: skip
    return made, said


def test_an_evaluator_whose_server_does_not_answer_is_told_the_end_later(tmp_path):
    link = Link()
    made, _ = machines(tmp_path, link)
    plan = made.plan(3, 1)
    link.errors = [lost(), RequestRefusedError("[Errno 28] No space left on device", "OSError")]
    for _ in range(4):
        made.finish_evaluator(plan)
    # Once, as soon as it answers.
    assert link.files == [("finished", b"3\n")]


def test_a_server_that_was_started_again_has_ports_later(tmp_path):
    link = Link(lost(), RequestRefusedError("a job that it does not run", ContextError.__name__))
    made, _ = machines(tmp_path, link)
    assert made.plan(0, 1).addresses == {Task("worker", 0): "a:7000", Task("evaluator", 0): "a:7001"}


def test_a_server_without_free_ports_ends_the_launch(tmp_path):
    text = "2 ports from 7000 to 7000 must be free. Received: 1."
    made, _ = machines(tmp_path, Link(RequestRefusedError(text, "ClusterError")))
    with pytest.raises(ClusterError, match=r"cannot start tasks. 2 ports from 7000"):
        made.plan(0, 1)


def test_a_server_whose_connection_is_lost_twice_is_taken(tmp_path):
    link = Link(lost(), lost(), lost())
    made, _ = machines(tmp_path, link)
    made.claim_all(tuple)
    assert link.claims == 4


def test_a_server_that_does_not_answer_is_named(tmp_path):
    link = Link(*[lost()] * 1000)
    made, _ = machines(tmp_path, link, answer=0.1)
    with pytest.raises(ClusterError, match=r"no answer from a:1 within 0.1 s: nothing listens there"):
        made.claim_all(tuple)


@pytest.mark.parametrize(
    ("refusal", "text"),
    [
        ("", r"no answer from a:1 within 0 s after they were lost. Run `unisono serve` there again"),
        ("A server trains for one client at a time.", r"a:1 says: A server trains for one client at a time"),
    ],
)
def test_a_lost_server_that_does_not_take_the_job_again_says_why(tmp_path, refusal, text):
    link = Link()
    link.is_live, link.refusal = False, refusal
    made, _ = machines(tmp_path, link, lost=0.0)
    with pytest.raises(ClusterError, match=text):
        made.wait_until_ready(1, tuple)


def server_link():
    """A link that was not used yet."""
    claim = Claim("job", "me", 10.0)
    return ServerLink("a:1", None, claim, lambda link: None, lambda: None, lambda address: False)


def test_a_server_that_is_lost_while_a_task_is_described_has_no_description(tmp_path, monkeypatch):
    made, _ = machines(tmp_path, Link())
    plan = made.plan(0, 1)
    link = made._links["a:1"] = server_link()
    link._is_prepared = True
    # Its thread loses it right after the first look.
    looks = [None, None, ServerInfo("i", str(tmp_path), (), "3.12.0", {})]
    monkeypatch.setattr(ServerLink, "_info", property(lambda link: looks.pop()), raising=False)
    assert made._job(plan, Task("worker", 0))["description"]["args"] == []
    assert made._job(plan, Task("worker", 0))["description"] == {}


def test_servers_may_be_lost_while_losses_are_read(tmp_path):
    link = server_link()
    made, said = machines(tmp_path, link)
    texts = [link._lost_text(f"loss {number}") for number in range(2)]
    known = iter(link.losses)
    seen = {next(known)}
    texts.append(link._lost_text("loss 2"))
    seen.update(known)
    assert seen == set(texts[:2])
    for text in texts:
        assert made.options_after(Failure(Task("worker", 0), 0.0, 1, text)).max_restarts == 10
    made.capacity(RunPaths(tmp_path))
    assert len(said) == 3
