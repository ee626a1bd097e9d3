"""Do the tests find small mistakes? Random mutants of the library, each run against the tests that reach it.

`make coverage` records which test runs which line. `make mutants N=20 SEED=1` changes one place of a copy of
the tree at a time: a comparison, a constant, an operator, a condition, a returned value, or a statement that
is left out. It runs the tests that run this line, those of the module's own files first, until one fails;
then the cluster tests that need the file. These are tests of `make test`; `--all` adds those that only
`make test-all` runs. A process that has imported JAX and Keras forks for each mutant.
"""

import argparse
import ast
import atexit
import collections
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("step", "collectives", "training/replica", "checkpoint", "parameter_server/state")
#: Seconds of CPU that the tests of one mutant may take, and of wall time that they may take.
MOST_CPU, MOST_WALL = 60, 600
#: What `make test` runs, and what `make test-all` adds.
QUICK, COSTLY = "not exhaustive and not slow", "exhaustive or slow"
SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or,
    ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
}  # fmt: skip
DROPPED = (ast.Raise, ast.AugAssign, ast.Continue, ast.Break, ast.Delete)

Mutant = collections.namedtuple("Mutant", "path line what source")


def replaced(node):
    """What stands for a node in a mutant; None for most."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        return ast.Compare(node.left, [SWAPPED[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(SWAPPED[type(node.op)](), node.values)
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        return ast.BinOp(node.left, SWAPPED[type(node.op)](), node.right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return ast.Constant(not node.value)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return ast.Constant(node.value + 1)
    if isinstance(node, ast.Return) and node.value is not None:
        return None if isinstance(node.value, ast.Constant) else ast.Return(ast.Constant(None))
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    is_stored = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    return ast.Pass() if is_call or is_stored or isinstance(node, DROPPED) else None


def mutants_of(path):
    """All mutants of one file."""
    text = path.read_text()
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    nodes = list(runs(ast.parse(text)))
    tests = [n.test for n in nodes if isinstance(n, ast.If | ast.IfExp | ast.While)]
    changes = [(node, replaced(node)) for node in nodes]
    changes += [
        (n, ast.UnaryOp(ast.Not(), n)) for n in tests if isinstance(n, ast.Name | ast.Attribute | ast.Call)
    ]
    for node, new in changes:
        if new is None:
            continue
        written = ast.unparse(new) if isinstance(new, ast.stmt) else f"({ast.unparse(new)})"
        first, last = node.lineno - 1, node.end_lineno - 1
        head, tail = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
        source = b"".join([*lines[:first], head, written.encode(), tail, *lines[last + 1 :]]).decode()
        yield Mutant(str(path.relative_to(ROOT)), node.lineno, f"{ast.unparse(node)} -> {written}", source)


def runs(tree):
    """The nodes that run when a function of the tree does: no annotation, no text, nothing only for types."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            parts = [*arguments.defaults, *(d for d in arguments.kw_defaults if d), *node.body]
            node = ast.Module(parts, [])  # noqa: PLW2901
        elif isinstance(node, ast.AnnAssign):
            node = ast.Module([node.value] if node.value else [], [])  # noqa: PLW2901
        elif isinstance(node, ast.JoinedStr | ast.pattern):
            continue
        elif isinstance(node, ast.keyword) and node.arg == "strict":
            continue  # of `zip`: what it finds does not happen
        else:
            yield node
        yield from runs(node)


class Reach:
    """Which tests run a line: by what `make coverage` recorded, and by the map of `make test-for`."""

    def __init__(self, recorded):
        import coverage

        self._data = coverage.CoverageData(str(recorded))
        self._data.read()
        self._tree, self._lines = Tree(ROOT), {}
        for name in self._data.measured_files():
            found = self._data.contexts_by_lineno(name)
            self._lines[name] = {
                line: {c.rpartition("|")[0] for c in tests} - {""} for line, tests in found.items()
            }
        # A test that runs few lines is quick, and is about these lines.
        self._size = collections.Counter(
            test for lines in self._lines.values() for tests in lines.values() for test in tests
        )

    def tests(self, mutant):
        """Those that run its line, the most promising first; for a line of no function, all its files."""
        lines = self._lines.get(str(ROOT / mutant.path), {})
        # Of a statement on several lines not each one is recorded.
        found = next(filter(None, (lines.get(mutant.line - i) for i in range(4))), set())
        own = self._tree.own(mutant.path) | {mutant.path}
        if found:
            return sorted(
                found, key=lambda test: (test.partition("::")[0] not in own, self._size[test], test)
            )
        files = set(self._tree.needed([mutant.path])) - {ALWAYS}
        return sorted(
            (f for f in files if not f.startswith("tests/cluster/")), key=lambda f: (f not in own, f)
        )

    def clusters(self, mutant):
        """The files of cluster tests that its file needs."""
        return [file for file in self._tree.needed([mutant.path]) if file.startswith("tests/cluster/")]


class Watch:
    """A plugin of pytest that notes the test that fails, and stops when the time is over."""

    def __init__(self):
        self.failed, self.ran, self.is_over = "", 0, False

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed = self.failed or report.nodeid
        self.ran += report.when == "call"

    def pytest_collectreport(self, report):
        if report.failed:
            self.failed = self.failed or f"collecting {report.nodeid}"

    def pytest_runtest_protocol(self, item):
        if resource.getrusage(resource.RUSAGE_SELF).ru_utime > MOST_CPU:
            self.is_over = True
            item.session.shouldstop = "the time is over"


def run_tests(arguments, folder, write):
    """Run pytest in this process; write which test failed, and what was run, to a descriptor."""
    os.setsid()
    output = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    # Those of the copy of the tree are others.
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    watch = Watch()
    code = pytest.main(["-x", "-p", "no:cacheprovider", "--timeout=120", *arguments], plugins=[watch])
    if code not in (0, 1) and not watch.failed and not watch.is_over:
        watch.failed = f"pytest itself, {code!r}"
    rest = ", the time was over" if watch.is_over else ""
    os.write(write, f"{watch.failed}\n{watch.ran} tests{rest}".encode())
    atexit._run_exitfuncs()


def found_by(arguments, folder):
    """Run pytest in a process of its own; return which test failed ("" if none did), and what was run."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            run_tests(arguments, folder, write)
        finally:
            os._exit(0)
    os.close(write)
    deadline = time.monotonic() + MOST_WALL
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.05)
    with open(read) as stream:
        failed, _, ran = stream.read().partition("\n")
    return failed if ran else "no end", ran


def judge(mutant, reach, folder, is_all):
    """Which test finds a mutant ("" if none does), in which round, and what was run.

    A test that fails without the mutant, too, judges nothing: the answer is None.
    """
    tests, clusters = reach.tests(mutant), reach.clusters(mutant)
    rounds = [(QUICK, tests), (QUICK, clusters)]
    if is_all:
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        rounds += [(COSTLY, files), (COSTLY, clusters)]
    place = folder / mutant.path
    place.write_text(mutant.source)
    seen, failed, marked = [], "", ""
    try:
        for marked, chosen in rounds:
            if not chosen:
                continue
            failed, ran = found_by(["-m", marked, *chosen], folder)
            seen.append(ran)
            if failed:
                break
    finally:
        shutil.copy2(ROOT / mutant.path, place)
    if "::" in failed and found_by([failed], folder)[0]:
        return None, marked, f"{failed} fails without it"
    return failed, marked, ", ".join(seen)


def main():
    """Draw mutants, judge each, and print a line for each and a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--all", action="store_true", help="also the tests that `make test` leaves out")
    parser.add_argument("--recorded", type=Path, default=ROOT / ".coverage")
    parser.add_argument("packages", nargs="*", default=PACKAGES)
    given = parser.parse_args()
    if not given.recorded.exists():
        sys.exit(
            f"Which test runs which line must be recorded. Received: no {given.recorded}. Run: make coverage"
        )
    reach = Reach(given.recorded)
    files = [path for name in given.packages for path in sorted((ROOT / "src/unisono" / name).rglob("*.py"))]
    mutants = [mutant for path in files for mutant in mutants_of(path)]
    drawn = random.Random(given.seed).sample(mutants, min(given.number, len(mutants)))
    counts = {name: [0, 0, 0] for name in given.packages}
    # Not a TemporaryDirectory: forked processes would remove it when they end.
    folder = Path(tempfile.mkdtemp(prefix="unisono-mutants-"))
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for path in listed.stdout.split("\0")[:-1]:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, folder / path)
        os.environ |= {"PYTHONPATH": f"{folder}/src", "JAX_COMPILATION_CACHE_DIR": f"{folder}/compiled"}
        sys.path[:] = [f"{folder}/src", str(folder), *(p for p in sys.path if p != str(ROOT))]
        for i, mutant in enumerate(drawn):
            failed, marked, ran = judge(mutant, reach, folder, given.all)
            package = next(p for p in given.packages if mutant.path.startswith(f"src/unisono/{p}/"))
            counts[package][0] += failed is not None
            counts[package][1] += bool(failed) and marked == QUICK
            counts[package][2] += bool(failed)
            verdict = f"found by {failed}" if failed else "not judged" if failed is None else "SURVIVES"
            print(f"{i + 1}. {mutant.path}:{mutant.line}: {mutant.what!r}\n   {verdict} ({ran})", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    total = [sum(column) for column in zip(*counts.values(), strict=True)]
    print("\n| package | mutants | found by `make test` | by all that ran |\n|---|---|---|---|")
    for package, (number, quick, found) in [*counts.items(), ("all", total)]:
        print(f"| `{package}` | {number} | {quick} | {found} |")


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(ROOT))
    os.environ["KERAS_BACKEND"] = "jax"
    # What tests load and does not load the library.
    import h5py  # noqa: F401
    import jax  # noqa: F401
    import keras  # noqa: F401
    import optax  # noqa: F401
    import pytest
    import sklearn.datasets  # noqa: F401
    from tests.needed import ALWAYS, Tree

    main()
