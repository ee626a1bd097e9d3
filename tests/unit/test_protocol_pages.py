"""The pages about protocols name the messages and records that the code has, and no others."""

import inspect
import re
from pathlib import Path

from unisono.checkpoint.commits import _commits, _uploads
from unisono.checkpoint.commits._manifests import MANIFEST
from unisono.parameter_server.server._server import VariableServer
from unisono.parameter_server.server._store import VariableStore
from unisono.parameter_server.worker._step_worker import StepWorker
from unisono.rpc._ops import Op

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
