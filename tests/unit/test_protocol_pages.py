"""The pages about protocols name the messages and records that the code has, and no others."""

import inspect
import re
from pathlib import Path

import pytest
from tests.simulation._primitives import simulated
from tests.simulation._runner import run_many
from tests.simulation.protocols import protocols

from unisono.checkpoint.commits import _commits, _uploads
from unisono.checkpoint.commits._manifests import MANIFEST
from unisono.launcher import _generation, _processes, _restart_policy, _run_files, _task
from unisono.launcher._plan import RunPaths
from unisono.launcher._supervisor import Outcome, Supervisor
from unisono.parameter_server.chief import _closures
from unisono.parameter_server.server._server import VariableServer
from unisono.parameter_server.server._store import VariableStore
from unisono.parameter_server.worker._step_worker import StepWorker
from unisono.rpc._ops import Op
from unisono.standalone._agent import Agent

DOCS = Path(__file__).parents[2] / "docs"
#: Answers, and what standalone servers are asked.
OTHERS = {Op.OK, Op.ERROR, Op.RESULT, Op.PORTS, Op.PUT, Op.GET, Op.START, Op.POLL, Op.SIGNAL, Op.SWEEP}


def rows(page, heading):
    """The cells of the table below a heading's line of names."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |")) + 2
    table = []
    for line in lines[begin:]:
        if not line.startswith("|"):
            return table
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table


def arrows(page, number):
    """The arrows of a page's diagram of states, as (from, to, text)."""
    text = (DOCS / page).read_text(encoding="utf-8")
    diagram = re.findall("```mermaid\nstateDiagram-v2\n(.*?)```", text, re.DOTALL)[number]
    lines = [line.strip().partition(": ") for line in diagram.splitlines()]
    return {(*line.split(" --> "), label) for line, _, label in lines}


def test_the_page_of_servers_names_the_messages():
    table = rows("protocol_servers.md", "request")
    named = {"server": set(), "worker": set()}
    for names, _, receivers, _ in table:
        for receiver in receivers.split(", "):
            named[receiver] |= set(re.findall("`([A-Z]+)`", names))
    served = {op.name for op in VariableServer(VariableStore())._handlers}
    assert named["server"] == served
    handled = set(re.findall(r"Op\.([A-Z]+)", inspect.getsource(StepWorker.handle)))
    assert named["worker"] == handled - {op.name for op in OTHERS}
    # No message is left that nothing needs.
    assert {op.name for op in set(Op) - OTHERS} == named["server"] | named["worker"]


def test_the_page_of_servers_names_the_records_of_logs():
    named = {
        name for kinds, _ in rows("protocol_servers.md", "record") for name in re.findall("`(.*?)`", kinds)
    }
    source = inspect.getsource(VariableStore)
    assert named == set(re.findall(r'commit\(\s*"([a-z]+)"', source))


def test_the_page_of_checkpoints_names_the_files():
    names = [name.strip("`") for name, *_ in rows("protocol_checkpoints.md", "name")]
    kinds = {found["kind"] for name in names if (found := _commits._ASIDE.match(name))}
    assert kinds == set(re.findall(r"[a-z]+", re.search(r"<kind>(.*?)\)", _commits._ASIDE.pattern)[1]))
    inside = [name.partition("/")[2] for name in names if name.startswith("ckpt-7/")]
    assert inside[0] == MANIFEST
    assert _uploads._DATA.fullmatch(inside[1] + "facts.json")
    assert names[-1] == _uploads._WRITER
    assert len(names) == 5


def test_the_page_of_servers_has_the_changes_of_closures():
    changes = {text for begin, _, text in arrows("protocol_servers.md", 0) if text and begin != "[*]"}
    source = inspect.getsource(_closures)
    made = set(re.findall(r"^def ([a-z]\w*)\(state: Closures.*-> Closures", source, re.MULTILINE))
    # A worker that is there, and an error that was raised, change no closure.
    assert changes == made - {"join", "forget_error"}


def test_the_page_of_launches_names_files_and_signals():
    signs = [name for name, *_ in rows("protocol_launcher.md", "sign")]
    named = {name for sign in signs for name in re.findall("`(.*?)`", sign)}
    signals = {name for name in named if name.startswith("SIG")}
    sources = "".join(inspect.getsource(module) for module in (_generation, _processes))
    assert signals == set(re.findall(r"signal\.(SIG[A-Z0-9]+)", sources))
    assert "signal.SIGUSR1" in inspect.getsource(_task)
    paths = {str(path.relative_to("x")) for path in vars(RunPaths(Path("x"))).values() if path != Path("x")}
    assert '"lock"' in inspect.getsource(_run_files.locked)
    # What tells nothing to a process that runs: a fact of the program, a secret, a cache, the servers' own.
    paths -= {"launch.json", "cluster_key", "compilation_cache", "servers"}
    assert named - signals == {*paths, "lock", "progress/", "errors/"}


def test_the_page_of_launches_names_why_a_generation_ends():
    named = {name.strip("`") for name, *_ in rows("protocol_launcher.md", "ends because")}
    assert named == {reason.value for reason in _restart_policy.FailureReason}


@pytest.mark.parametrize("count", [12, pytest.param(250, marks=pytest.mark.exhaustive)])
def test_the_diagram_of_launches_is_what_they_do(monkeypatch, count):
    seen = set()
    real = Supervisor._decide_next

    def decided(self, tasks, ending):
        found = real(self, tasks, ending)
        reason = ending.reason.name.lower()
        seen.add(("training", reason))
        seen.add((reason, "[*]" if isinstance(found, Outcome) else "training"))
        return found

    monkeypatch.setattr(Supervisor, "_decide_next", decided)
    launches = [protocols()[name] for name in ("generations", "preemptions")]
    with simulated() as look:
        for protocol in launches:
            _, failures = run_many(protocol, range(count), look)
            assert not failures
    drawn = {(begin, end) for begin, end, _ in arrows("protocol_launcher.md", 0)} - {("[*]", "training")}
    assert seen <= drawn
    if count > 100:
        assert seen == drawn
    else:
        assert {("training", "failed"), ("failed", "training"), ("done", "[*]")} <= seen


def test_the_page_of_standalone_servers_names_the_messages():
    table = rows("protocol_standalone.md", "request")
    named = {name for names, *_ in table for name in re.findall("`([A-Z]+)`", names)}
    assert named == set(re.findall(r"Op\.([A-Z]+)", inspect.getsource(Agent))) - {"OK"}
