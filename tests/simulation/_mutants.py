"""Random small mistakes in the packages that have protocols: does a schedule of those that reach them fail?

One place of a function is changed at a time, as `make mutants` does, while the module is loaded. A process of
its own runs schedules of each of the package's protocols until one fails. A protocol that does not reach the
place within a few schedules is left out.

Tests: tests/unit/test_simulation.py.
"""

import ast
import collections
import contextlib
import dataclasses
import importlib
import json
import os
import random
import resource
import time
from pathlib import Path

from tools.mutation import replaced, runs

from tests.simulation._no_protocol import lines_left_out
from tests.simulation._reached import LEFT_OUT, SOURCE

#: The protocols of each package, those that run its code most first.
PROTOCOLS = {
    "cluster/liveness": ("peers", "generations"),
    "cluster/rendezvous": ("rendezvous",),
    "rpc": ("calls", "messages", "pushes", "closures", "transport"),
    "rpc/_transport": ("transport",),
    "parameter_server/chief": ("closures", "datasets", "closures_and_restarts", "chiefs"),
    "parameter_server/server": (
        "pushes", "restarts", "logs", "snapshots", "damaged_logs", "wrong_requests", "pulls", "absence",
    ),
    "parameter_server/state": ("logs", "damaged_logs", "snapshots", "reboots", "pushes", "wrong_requests"),
    "parameter_server/worker": ("closures", "datasets", "closures_and_restarts"),
    "launcher": ("generations", "single_restarts", "preemptions", "processes"),
    "standalone": ("links", "serving", "leases"),
    "checkpoint/commits": ("disk", "object_store", "damage", "rivals", "rivals_in_store", "nfs"),
}  # fmt: skip
#: Schedules after which a protocol that does not reach the place is left out.
_FEW = 20
#: Seconds of CPU after which schedules that do not end are stopped.
_HANGS = 60


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A place of a function, and what stands there instead.

    Args:
        module: as `"rpc/_calls"`.
        function: the outermost one, as `"Class.method"`.
        place: which of the function's nodes.
    """

    module: str
    function: str
    place: int
    line: int
    what: str

    @property
    def package(self):
        """The package, as `PROTOCOLS` has it."""
        return str(Path(self.module).parent)

    @contextlib.contextmanager
    def planted(self, reached):
        """Run the block with the mutant; `reached` is called where its statement begins."""
        tree = ast.parse((SOURCE / f"{self.module}.py").read_text())
        owner = dict(_functions(tree))[self.function]
        node = list(runs(owner))[self.place]
        _put_before(owner.body, node, ast.parse("__reached__()").body[0])
        _Change(node).visit(owner)
        code = _code_of(
            compile(ast.fix_missing_locations(tree), str(SOURCE / f"{self.module}.py"), "exec"), self.function
        )
        function = _loaded(self.module, self.function)
        before, function.__globals__["__reached__"] = function.__code__, reached
        function.__code__ = code
        try:
            yield
        finally:
            function.__code__ = before
            del function.__globals__["__reached__"]


def mutants_of(module):
    """All mutants of a module's functions."""
    source = (SOURCE / f"{module}.py").read_text()
    skipped = lines_left_out(module, source)
    for name, function in _functions(ast.parse(source)):
        for place, node in enumerate(runs(function)):
            new = replaced(node)
            if new is None or node.lineno in skipped or _is_for_people(node):
                continue
            what = f"{ast.unparse(node)} -> {ast.unparse(new)}"
            yield Mutant(module, name, place, node.lineno, what)


def drawn(number, seed, packages=tuple(PROTOCOLS)):
    """Return random mutants of some packages."""
    modules = [
        f"{package}/{path.stem}" for package in packages for path in sorted((SOURCE / package).glob("*.py"))
    ]
    every = [mutant for module in modules if module not in LEFT_OUT for mutant in mutants_of(module)]
    return random.Random(seed).sample(every, min(number, len(every)))


def judge(mutant, first, most, seconds):
    """Return which protocol finds a mutant: empty where none does, None where none reaches it.

    Args:
        first: the first seed.
        most: schedules of each protocol; seconds: of CPU for all of them.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            spent = int(time.process_time())
            resource.setrlimit(resource.RLIMIT_CPU, (spent + int(seconds) + _HANGS,) * 2)
            os.write(write, json.dumps(_search(mutant, first, most, seconds)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as stream:
        text = stream.read()
    _, status = os.waitpid(pid, 0)
    if text:
        return json.loads(text)
    return "a schedule that does not end" if os.WIFSIGNALED(status) else None


def _search(mutant, first, most, seconds):
    from tests.simulation._primitives import simulated
    from tests.simulation._runner import run_many, run_one
    from tests.simulation.protocols import protocols

    until, hits = time.process_time() + seconds, []
    names = list(PROTOCOLS[mutant.package])
    is_reached = False
    with simulated() as look:
        for begin in range(first, first + most, _FEW):
            for name in tuple(names):
                if time.process_time() > until:
                    break
                protocol = protocols()[name]
                hits.clear()
                with mutant.planted(lambda: hits.append(1)):
                    _, failures = run_many(protocol, range(begin, begin + _FEW), look)
                is_reached |= bool(hits)
                if failures and run_one(protocol, failures[0].seed).error is None:
                    return f"{name}, seed {failures[0].seed}: {failures[0].what}"
                if not hits:
                    names.remove(name)
    return "" if is_reached else None


def report(mutants, first, most, seconds, say=print):
    """Judge mutants; say what finds each, and return a table with a row for each package."""
    counts = collections.defaultdict(lambda: [0, 0, 0])
    for mutant in mutants:
        found = judge(mutant, first, most, seconds)
        for own in (counts[mutant.package], counts["all"]):
            own[0] += 1
            own[1] += found is not None
            own[2] += bool(found)
        verdict = "not reached" if found is None else found or "SURVIVES"
        say(f"{mutant.module}.py:{mutant.line}: {mutant.what!r}\n   {verdict}")
    rows = [(package, counts[package]) for package in (*PROTOCOLS, "all") if package in counts]
    lines = [f"| `{package}` | {' | '.join(map(str, numbers))} |" for package, numbers in rows]
    return "\n".join(["| package | mutants | reached | found |", "|---|---|---|---|", *lines])


# --- places ------------------------------------------------------------------------------------------------


def _functions(tree):
    """The outermost functions of a module, and the methods of its classes."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    yield f"{node.name}.{inner.name}", inner


def _is_for_people(node):
    """Return whether a statement logs, or is the text of an error."""
    text = ast.unparse(node)
    return isinstance(node, ast.Expr) and text.startswith(("_LOG.", "logging."))


def _put_before(body, node, probe):
    """Put a statement before the innermost one that holds a node."""
    for at, statement in enumerate(body):
        if not any(inner is node for inner in ast.walk(statement)):
            continue
        inner_bodies = [getattr(statement, name, ()) for name in ("body", "orelse", "finalbody")]
        inner_bodies += [handler.body for handler in getattr(statement, "handlers", ())]
        for inner in inner_bodies:
            if isinstance(inner, list) and _put_before(inner, node, probe):
                return True
        body.insert(at, probe)
        return True
    return False


class _Change(ast.NodeTransformer):
    """Puts what stands for a node in a mutant into its tree."""

    def __init__(self, node):
        self._node = node

    def visit(self, node):
        return replaced(node) if node is self._node else self.generic_visit(node)


def _code_of(code, name):
    for constant in code.co_consts:
        if hasattr(constant, "co_code"):
            if constant.co_qualname == name:
                return constant
            if name.startswith(f"{constant.co_qualname}."):
                return _code_of(constant, name)
    raise LookupError(name)


def _loaded(module, name):
    """Return a function as it was loaded, below what its decorators have made of it."""
    found = importlib.import_module(f"unisono.{module.replace('/', '.')}")
    for part in name.split("."):
        found = vars(found)[part]
    for attribute in ("fget", "func", "__func__"):
        found = getattr(found, attribute, found)
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    return found
