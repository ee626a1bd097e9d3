"""The house of docs/architecture.md: floors, no circles, doors, sizes."""

import ast
import fnmatch
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "unisono"

#: A file imports only from lower floors. Packages' `__init__` files are maps, which files of the
#: library do not import from.
FLOORS = {
    "_backend": 1,
    "_pooling": 1,
    "_context": 3,
    "_errors": 0,
    "_evaluator._choice": 1,
    "_evaluator._record": 2,
    "_evaluator._restoring": 15,
    "_evaluator._sidecar": 16,
    "_events": 1,
    "_export._files": 1,
    "_export._loaded": 2,
    "_export._packages": 1,
    "_export._signature": 2,
    "_export._specs": 1,
    "_export._stablehlo": 4,
    "_export._through_keras": 5,
    "_launching": 7,
    "_mesh": 2,
    "_names": 0,
    "_summaries": 6,
    "_reads": 1,
    "_tracebacks": 1,
    "_values": 1,
    "callbacks._backup": 17,
    "callbacks._data": 3,
    "callbacks._interval": 1,
    "callbacks._run": 16,
    "callbacks._series": 15,
    "callbacks._states": 2,
    "callbacks._tensorboard": 8,
    "callbacks._timer": 2,
    "callbacks._watch": 4,
    "checkpoint._agreement": 1,
    "checkpoint._arrays": 1,
    "checkpoint._checkpoint": 14,
    "checkpoint._commits": 1,
    "checkpoint._contents": 12,
    "checkpoint._facts": 1,
    "checkpoint._finished": 1,
    "checkpoint._manager": 15,
    "checkpoint._names": 1,
    "checkpoint._preemption": 16,
    "checkpoint._random": 1,
    "checkpoint._reader": 15,
    "checkpoint._restoring": 13,
    "checkpoint._tracking": 1,
    "checkpoint._watcher": 17,
    "checkpoint._writer": 1,
    "cli.__main__": 16,
    "cli._app": 15,
    "cli._decide": 2,
    "cli._doctor": 14,
    "cli._files": 2,
    "cli._generation": 4,
    "cli._guard": 1,
    "cli._lines": 1,
    "cli._launch": 6,
    "cli._options": 1,
    "cli._plan": 2,
    "cli._processes": 3,
    "cli._progress": 2,
    "cli._screen": 3,
    "cli._supervisor": 5,
    "cli._task": 5,
    "cluster._attendance": 3,
    "cluster._beat": 4,
    "cluster._bootstrap": 6,
    "cluster._compiled": 0,
    "cluster._differences": 0,
    "cluster._fingerprint": 0,
    "cluster._gce": 4,
    "cluster._hostlist": 1,
    "cluster._jax": 4,
    "cluster._kubernetes": 4,
    "cluster._lookout": 4,
    "cluster._meeting": 1,
    "cluster._mpi": 4,
    "cluster._pending": 0,
    "cluster._preflight": 3,
    "cluster._presence": 2,
    "cluster._reception": 2,
    "cluster._record": 1,
    "cluster._relay": 1,
    "cluster._resolve": 5,
    "cluster._resolvers": 3,
    "cluster._slurm": 4,
    "cluster._spec": 1,
    "cluster._tf_config": 2,
    "cluster._tpu": 4,
    "cluster._tpu_topology": 1,
    "cluster._union": 4,
    "cluster._words": 3,
    "cluster_resolver": 6,
    "collectives._cross_device": 3,
    "collectives._packing": 1,
    "collectives._reduce": 2,
    "data._distribute": 3,
    "data._sharding": 1,
    "data._workers": 3,
    "experimental": 18,
    "export": 12,
    "nn": 6,
    "step._call": 2,
    "step._compiler": 8,
    "step._differentiate": 1,
    "step._distributed": 6,
    "step._engines": 6,
    "step._explain": 2,
    "step._fetching": 6,
    "step._function": 9,
    "step._functional": 7,
    "step._identity": 1,
    "step._interrupts": 0,
    "step._input_signature": 2,
    "step._program": 5,
    "step._results": 9,
    "step._scatter": 5,
    "step._scope": 4,
    "step._tape": 7,
    "step._variables": 4,
    "strategies._base": 12,
    "strategies._central_storage": 13,
    "strategies._extended": 5,
    "strategies._mirrored": 13,
    "strategies._multi_worker": 17,
    "strategies._one_device": 13,
    "strategies._options": 1,
    "strategies._steps": 4,
    "strategies._tpu": 13,
    "summary": 7,
    "testing": 4,
    "tpu.experimental": 5,
    "training._added": 5,
    "training._ahead": 2,
    "training._alike": 3,
    "training._bind": 11,
    "training._callbacks": 2,
    "training._apart": 4,
    "training._briefing": 1,
    "training._clock": 1,
    "training._companion": 1,
    "training._described": 1,
    "training._compared": 3,
    "training._fit": 10,
    "training._inputs": 4,
    "training._holders": 4,
    "training._joined": 4,
    "training._keeping": 1,
    "training._loops": 1,
    "training._losses": 5,
    "training._metrics": 5,
    "training._placing": 9,
    "training._rowrules": 1,
    "training._rows": 4,
    "training._rowstates": 0,
    "training._rowwise": 2,
    "training._saving": 2,
    "training._step": 9,
}

#: The pipeline of `unisono.data.Dataset` stands on its own: it imports nothing of the others.
PIPELINE_FLOORS = range(3)

#: What may be imported or read in which files only.
DOORS = {
    "import zmq": ["ps._transport"],
    "import jax.distributed": ["cluster._bootstrap"],
    "import keras.src": [],
    "import tensorboard": ["_events"],
    "import orbax": ["checkpoint._arrays"],
    "import h5py": ["_evaluator._restoring"],
    "import subprocess": ["cli", "testing"],
    "os.environ": ["_backend", "_tracebacks", "_mesh", "cluster._resolvers", "cli"],
    "os.getenv": ["cluster._resolvers", "cli"],
    "os.putenv": [],
    "jax.devices": ["_mesh"],
    "jax.local_devices": ["_mesh"],
    "jax.distributed": ["cluster._bootstrap"],
}


def name_of(path):
    return ".".join(path.relative_to(SRC).with_suffix("").parts)


FILES = {name_of(p): p for p in sorted(SRC.rglob("*.py"))}
MODULES = {n: p for n, p in FILES.items() if not n.endswith("__init__")}
TREES = {n: ast.parse(p.read_text()) for n, p in FILES.items()}


def imports_of(tree):
    """The modules that a file imports, also inside functions, but not for types alone."""
    found = set()
    for node in _visited(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _visited(node):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for statement in child.orelse:
                yield statement
                yield from _visited(statement)
            continue
        yield child
        yield from _visited(child)


def own_imports(name):
    names = {i.removeprefix("unisono.") for i in imports_of(TREES[name]) if i.startswith("unisono.")}
    return {n for n in names if n in MODULES}


def is_pipeline(name):
    return name.startswith("data.") and name not in FLOORS


@pytest.mark.parametrize("name", MODULES)
def test_every_file_imports_lower_floors_only(name):
    if is_pipeline(name):
        assert all(is_pipeline(i) or FLOORS[i] in PIPELINE_FLOORS for i in own_imports(name))
        return
    assert name in FLOORS, f"give {name} a floor here and in docs/architecture.md"
    for imported in own_imports(name):
        floor = max(PIPELINE_FLOORS) if is_pipeline(imported) else FLOORS[imported]
        assert floor < FLOORS[name], f"{name} (floor {FLOORS[name]}) imports {imported} (floor {floor})"


def test_no_floor_is_left_behind():
    assert set(FLOORS) <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_private_modules_are_imported_directly(name):
    """Not through the packages' maps, and not by relative names: both hide a floor."""
    packages = {f"unisono.{n}".removesuffix(".__init__") for n in FILES if n.endswith("__init__")}
    for node in _visited(TREES[name]):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: write `from unisono...`: {ast.unparse(node)}"
            for alias in node.names if node.module in packages else []:
                module = f"{node.module}.{alias.name}".removeprefix("unisono.")
                assert module in MODULES, f"{name} imports from a package's map: {ast.unparse(node)}"
        elif isinstance(node, ast.Import):
            assert not packages & {alias.name for alias in node.names}, f"{name}: {ast.unparse(node)}"


def documented_floors():
    """From the table in docs/architecture.md: patterns of files, and their floor."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    for floor, files in re.findall(r"^\| (\d+) \| ([^|]*) \|", text, flags=re.MULTILINE):
        for pattern in re.findall(r"`([^`]+)`", files):
            yield pattern.replace("/", "."), int(floor)


@pytest.mark.parametrize("name", FLOORS)
def test_the_documented_floors_are_these(name):
    documented = list(documented_floors())
    exact = [floor for pattern, floor in documented if pattern == name]
    floors = exact or [floor for pattern, floor in documented if fnmatch.fnmatch(name, pattern)]
    assert floors == [FLOORS[name]], f"{name}: docs/architecture.md says {floors}"


def test_no_import_circle():
    done, path = set(), []

    def visit(name):
        assert name not in path, f"a circle: {' -> '.join([*path, name])}"
        if name in done:
            return
        path.append(name)
        for imported in own_imports(name):
            visit(imported)
        path.pop()
        done.add(name)

    for name in MODULES:
        visit(name)


@pytest.mark.parametrize("door", DOORS)
def test_doors(door):
    for name, tree in TREES.items():
        if door.startswith("import "):
            module = door.removeprefix("import ")
            uses = any(i == module or i.startswith(module + ".") for i in imports_of(tree))
        else:
            uses = door in imports_of(tree) or any(
                isinstance(n, ast.Attribute) and ast.unparse(n) == door for n in ast.walk(tree)
            )
        allowed = any(name == d or name.startswith(d + ".") for d in DOORS[door])
        assert allowed or not uses, f"{name} uses {door}, which belongs to {DOORS[door]}"


def test_keras_is_wrapped_in_one_file():
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
                targets = node.args[:1]
            wraps = any(ast.unparse(t).startswith("keras.") for t in targets)
            assert not wraps or name == "training._bind", f"{name} assigns to Keras"


@pytest.mark.parametrize("name", FILES)
def test_files_are_short(name):
    assert len(FILES[name].read_text().splitlines()) <= 500


def functions():
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield name, node


def _length(node):
    """Lines of code: a docstring explains, and does not count."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if not body:
        return 1
    return 1 + body[-1].end_lineno - body[0].lineno + 1


def test_functions_are_short():
    lengths = sorted((_length(node), f"{name}.{node.name}") for name, node in functions())
    assert lengths[-1][0] <= 60, lengths[-1]
    assert lengths[int(0.9 * len(lengths))][0] <= 30


def test_arguments_are_annotated():
    for name, node in functions():
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        every += [a for a in (node.args.vararg, node.args.kwarg) if a is not None]
        bare = [a.arg for a in every if a.annotation is None and a.arg not in ("self", "cls")]
        assert not bare, f"{name}.{node.name}: {bare}"


def test_no_assert_in_the_library():
    for name, tree in TREES.items():
        assert not any(isinstance(n, ast.Assert) for n in ast.walk(tree)), name
