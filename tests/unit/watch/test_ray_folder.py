"""A job that is found on Ray by its name; Ray itself is in tests/cluster/test_ray_cluster.py."""

import json
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from tests.unit.standalone.test_agent import ME, Server
from tests.unit.watch.test_page import data_in
from tests.unit.watch.test_server_folder import NOW, line

from unisono._errors import ClusterError
from unisono.cli import _timeline_page
from unisono.ray import _engine
from unisono.ray._actors import NAMESPACE
from unisono.rpc._frames import Frame
from unisono.rpc._ops import Op
from unisono.watch import _ray_folder, _server_folder
from unisono.watch._job_reader import JobReader
from unisono.watch._places import find_job
from unisono.watch._server_folder import JoinedFolder
from unisono.watch.web import _job_page
from unisono.watch.web._job_page import watch_on_page


class RayError(Exception):
    """Ray's own."""


class Actor:
    """An actor with one task of a job, whose method is called as Ray's are."""

    def __init__(self, root, task):
        root.mkdir()
        server = Server(root)
        server.hello()
        self.file = root / "one" / "events" / f"{task}.jsonl"
        self.agent, self.is_there = server.agent, True
        self.look = self

    def options(self, max_task_retries):
        assert max_task_retries == 0
        return self

    def remote(self, meta):
        answer = self.agent.handle(ME, Frame(Op.STATUS, meta=meta))
        return self, (answer.op.name, dict(answer.meta), b"".join(x.tobytes() for x in answer.arrays))


@pytest.fixture
def actors(tmp_path, monkeypatch, tuned):
    """Two actors of the newest launch of `train.py`, and names of others; by name."""
    tuned(_server_folder, _FRESH_SECONDS=0.0)
    found = {f"train.py/02/worker-{i}": Actor(tmp_path / f"{i}", f"worker-{i}") for i in range(2)}
    named = [(NAMESPACE, name) for name in (*found, "train.py/01/worker-0", "other.py/03/worker-0")]

    def get(answer, timeout):
        assert timeout
        if not answer[0].is_there:
            raise RayError("the actor is dead")
        return answer[1]

    listed = [{"namespace": n, "name": name} for n, name in [*named, ("else", "train.py/09/worker-0")]]
    fake = SimpleNamespace(
        is_initialized=lambda: True,
        util=SimpleNamespace(list_named_actors=lambda all_namespaces: listed),
        get_actor=lambda name, namespace: found[name],
        get=get,
        exceptions=SimpleNamespace(RayError=RayError),
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(_ray_folder, "_has_ray", lambda: True)
    return found


def test_the_newest_launch_of_a_name_is_read_also_while_an_actor_is_away(actors):
    first, second = actors.values()
    second.is_there = False
    first.file.write_text(line(1) + "\n")
    second.file.write_text(line(3) + "\n")
    reader = JobReader(JoinedFolder(_ray_folder.folders_of_job("train.py")), lambda: NOW + 4)
    job = reader.refresh()
    assert (job.title, [(task.name, task.step) for task in job.tasks]) == (
        "train.py on Ray",
        [("worker:0", 1)],
    )
    second.is_there = True
    assert [(task.name, task.step) for task in reader.refresh().tasks] == [("worker:0", 1), ("worker:1", 3)]
    assert reader.bytes_read == len(line(1)) + len(line(3)) + 2
    assert _ray_folder.folders_of_job("nothing.py") == []


def test_a_cluster_that_is_gone(actors, monkeypatch):
    def connect(address):
        raise ClusterError(f"no cluster at {address}")

    monkeypatch.setattr(sys.modules["ray"], "is_initialized", lambda: False)
    monkeypatch.setattr(_engine, "connect", connect)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert _ray_folder.folders_of_job("train.py") == []
    # The history of a launch is shown all the same; an address that is given is an error.
    assert _ray_folder.folders_of_places({"launch": "train.py/02", "address": "10.0.0.1:6379"}) == []
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ClusterError, match=r"no cluster at 10\.0\.0\.1:6379"):
        _ray_folder.folders_of_job("train.py")


@pytest.mark.parametrize("places", [{}, {"launch": 3, "address": "auto"}, {"launch": "train.py/02"}])
def test_other_records_of_a_launch_name_no_actors(actors, places):
    assert _ray_folder.folders_of_places(places) == []


def page_until_the_end(job, end, tuned):
    """Serve the page of a job, and end the job once it is served; return what was said."""
    tuned(_job_page, _LOOK=0.02)
    lines = []
    watcher = threading.Thread(target=watch_on_page, args=(job, "127.0.0.1:0", lines.append))
    watcher.start()
    deadline = time.monotonic() + 60
    while len(lines) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    # After the first look, at which a job that has ended is another case.
    time.sleep(0.2)
    end()
    watcher.join(60)
    assert not watcher.is_alive()
    return lines


def test_the_page_of_actors_alone_is_kept_where_the_watcher_runs(actors, tmp_path, monkeypatch, tuned):
    """Their steps are gone with them."""
    monkeypatch.chdir(tmp_path)
    now = [NOW + 4]
    for actor, step in zip(actors.values(), (1, 3), strict=True):
        actor.file.write_text(line(step) + "\n")
    job = JobReader(JoinedFolder(_ray_folder.folders_of_job("train.py")), lambda: now[0])

    def end():
        for actor in actors.values():
            actor.is_there = False
        now[0] += 100

    lines = page_until_the_end(job, end, tuned)
    copy = tmp_path / "timeline-train.py-on-Ray.html"
    assert lines[2:] == [f"unisono: the page is kept in {copy}"]
    facts = data_in(copy.read_text())["job"]
    assert (facts["state"], [task["step"] for task in facts["tasks"]]) == ("ended", [1, 3])
    assert facts["timeline"]["worker:1"]


def test_the_page_of_a_launch_on_ray_is_kept_in_its_log_folder(actors, tmp_path, monkeypatch, tuned):
    monkeypatch.chdir(tmp_path)
    logs = tmp_path / "logs"
    logs.mkdir()
    places = {"kind": "ray", "launch": "train.py/02", "address": "auto"}
    (logs / "launch.json").write_text(json.dumps({"title": "train.py --lr 1", "servers": places}))
    (logs / "worker-0.log").write_text("the log\n")
    event = {"event": "launched", "time": NOW, "generation": 0, "task": None, "detail": ""}
    event |= {"pid": None, "exit_code": None}
    started = [{**event, "event": "started", "task": f"worker:{i}", "pid": i + 1} for i in range(2)]
    history = logs / "history.jsonl"
    history.write_text("".join(json.dumps(each) + "\n" for each in (event, *started)))
    for actor, step in zip(actors.values(), (1, 3), strict=True):
        actor.file.write_text(line(step) + "\n")

    def end():
        for actor in actors.values():
            actor.is_there = False
        with history.open("a") as file:
            file.write(json.dumps({**event, "event": "quit", "time": NOW + 5, "exit_code": 0}) + "\n")

    lines = page_until_the_end(find_job(str(logs)), end, tuned)
    assert lines[2:] == [f"unisono: the page is kept in {logs}/timeline.html"]
    facts = data_in((logs / "timeline.html").read_text())
    assert (facts["job"]["state"], [task["step"] for task in facts["job"]["tasks"]]) == ("ended", [1, 3])
    assert facts["logs"]["worker:0"] == "the log\n"
    assert [path.name for path in tmp_path.glob("*.html")] == []
    # The actors are gone: what `unisono timeline` could make anew has no steps.
    kept = (logs / "timeline.html").read_text()
    assert "has kept it" in _timeline_page.main(logs)
    assert (logs / "timeline.html").read_text() == kept
    assert json.loads((logs / "timeline.json").read_text())["traceEvents"]
    # The page of an earlier launch is not this one's.
    places["launch"] = "train.py/03"
    (logs / "launch.json").write_text(json.dumps({"title": "train.py --lr 1", "servers": places}))
    assert "has kept it" not in _timeline_page.main(logs)
    assert (logs / "timeline.html").read_text() != kept
