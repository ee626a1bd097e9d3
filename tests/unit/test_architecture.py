"""The structure of docs/architecture.md: layers, no circles, doors, sizes, one meaning for each name."""

import ast
import collections
import functools
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "unisono"

#: What may be imported or read in which files only.
DOORS = {
    "import zmq": ["rpc._transport"],
    "import jax.distributed": ["cluster._distributed"],
    "import keras.src": [],
    "import tensorboard": ["_summary._event_files"],
    "import orbax": ["checkpoint._arrays"],
    "import fsspec": ["_system._object_store"],
    "import h5py": ["evaluator._restoring", "tf.adapters.models._loading"],
    "import subprocess": ["launcher", "testing"],
    "os.environ": ["_backend", "_tracebacks", "_lowering._xla_flags", "_system._environ", "cli", "launcher"],
    "os.getenv": ["_system._environ", "cli", "launcher"],
    "os.putenv": [],
    "os.fsync": ["_system._files"],
    "jax.devices": ["_mesh"],
    "jax.local_devices": ["_mesh"],
    "jax.distributed": ["cluster._distributed"],
}


def name_of(path):
    return ".".join(path.relative_to(SRC).with_suffix("").parts)


FILES = {name_of(p): p for p in sorted(SRC.rglob("*.py"))}
MODULES = {n: p for n, p in FILES.items() if not n.endswith("__init__")}
TEST_FILES = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
PACKAGES = {f"unisono.{n}".removesuffix(".__init__") for n in FILES if n.endswith("__init__")}


@functools.cache
def trees():
    """All files by their names; parsed for the first test, not when each process of pytest collects."""
    return {name: ast.parse(path.read_text()) for name, path in FILES.items()}


@functools.cache
def imports_of(tree):
    """The modules that a file imports, also inside functions, but not for types alone."""
    found = set()
    for node in visited_in(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "unisono.spi":
            # A map: what is imported is the module that has the name.
            found.update(SPI[alias.name] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def names_of_map(path):
    """From each name that a file imports, and shows again, to the module that has it."""
    return {
        alias.name: node.module
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


#: What code above the strategies may import of the engine, besides public names.
SPI = names_of_map(SRC / "spi" / "__init__.pyi")


@functools.cache
def nodes_of(tree):
    """All nodes of a file; twelve tests look at them."""
    return list(ast.walk(tree))


@functools.cache
def visited_in(tree):
    """The nodes of a file but for what is there for types alone."""
    return list(_visited(tree))


def _visited(node):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING":
            for statement in child.orelse:
                yield statement
                yield from _visited(statement)
            continue
        yield child
        yield from _visited(child)


@functools.cache
def attributes_of(tree):
    """All `a.b.c` of a file."""
    return {ast.unparse(n) for n in nodes_of(tree) if isinstance(n, ast.Attribute) and is_dotted(n)}


def is_dotted(node):
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


@functools.cache
def own_imports(name):
    return modules_in(trees()[name])


def modules_in(tree):
    """The modules of Unisono that a tree imports."""
    names = {i.removeprefix("unisono.") for i in imports_of(tree) if i.startswith("unisono.")}
    return {n for n in names if n in MODULES}


def documented_layers(text):
    """The table in docs/architecture.md, lowest layer first: the modules and packages of each layer."""
    rows = re.findall(r"^\| \d+ \| [^|]+ \| ([^|]+) \|", text, flags=re.MULTILINE)
    return [re.findall(r"`([^`]+)`", row) for row in rows]


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
LAYERS = documented_layers(ARCHITECTURE)


def layer_of(name):
    """The number of a module's layer, that of the longest name in the table that it begins with."""
    found = [(len(p), i) for i, row in enumerate(LAYERS) for p in row if f"{name}.".startswith(f"{p}.")]
    assert found, f"give {name} a layer in docs/architecture.md"
    return max(found)[1]


def test_every_file_imports_its_own_layer_or_lower_ones():
    for name, imported in ((n, i) for n in MODULES for i in own_imports(n)):
        own, other = layer_of(name), layer_of(imported)
        assert other <= own, f"{name} (layer {own + 1}) imports {imported} (layer {other + 1})"


def test_the_layers_name_no_module_that_is_gone():
    prefixes = {".".join(name.split(".")[:i]) for name in FILES for i in range(1, 4)}
    assert not {p for row in LAYERS for p in row} - prefixes


def test_the_drawing_shows_the_layers_of_the_table_and_real_imports():
    (drawing,) = re.findall(r"```mermaid\n(.*?)```", ARCHITECTURE, flags=re.DOTALL)
    for number, inside in re.findall(r"subgraph L(\d+) .*?\n(.*?) {4}end", drawing, flags=re.DOTALL):
        assert set(inside.split()) <= set(LAYERS[int(number) - 1]), f"layer {number} of the drawing"
    for importer, imported in re.findall(r"(\w+) --> (\w+)", drawing):
        importers = [n for n in MODULES if f"{n}.".startswith(f"{importer}.")]
        found = {i.split(".")[0] for name in importers for i in own_imports(name)}
        assert imported in found, f"no module of {importer} imports {imported}"


def test_files_and_classes_that_the_document_names_exist():
    """Such as `step/_tape`, `step/_dispatch.CompiledStep` or `data/_pipeline`."""
    for path, name in re.findall(r"`((?:\w+/)+\w+)(?:\.(\w+))?(?:\.\w+)?`", ARCHITECTURE):
        if name == "py":
            assert (ROOT / f"{path}.py").exists(), f"docs/architecture.md names {path}.py"
            continue
        module = path.replace("/", ".")
        assert module in MODULES or f"{module}.__init__" in FILES, f"docs/architecture.md names {path}"
        if name:
            found = {
                n.name for n in nodes_of(trees()[module]) if isinstance(n, (ast.ClassDef, ast.FunctionDef))
            }
            assert name in found, f"docs/architecture.md names {name} in {path}"


def test_the_pipeline_stands_on_its_own():
    """`data/_pipeline` is the part of `unisono.data` that knows neither devices nor strategies."""
    allowed = ("data._pipeline.", "_errors", "_types", "_checks", "_reads", "_system.")
    for name in (n for n in MODULES if n.startswith("data._pipeline.")):
        assert all(imported.startswith(allowed) for imported in own_imports(name)), name


def test_private_modules_are_imported_directly():
    """Not through the packages' maps, and not by relative names: both hide a layer."""
    for name, node in ((m, n) for m in MODULES for n in visited_in(trees()[m])):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: write `from unisono...`: {ast.unparse(node)}"
            for alias in node.names if node.module in PACKAGES - {"unisono.spi"} else []:
                module = f"{node.module}.{alias.name}".removeprefix("unisono.")
                assert module in MODULES, f"{name} imports from a package's map: {ast.unparse(node)}"
        elif isinstance(node, ast.Import):
            assert not PACKAGES & {alias.name for alias in node.names}, f"{name}: {ast.unparse(node)}"


#: The packages that are written as a package of somebody else would be.
ABOVE = ("estimator", "feature_column", "preprocessing", "tf")

#: How many private modules these packages import, of each other, too. It may only shrink.
PRIVATE_IMPORTS = 12

#: What `unisono.spi` may grow to: a list of everything would be no interface.
MOST_NAMES = 18


def public_names():
    """The pairs of a module and a name in it that users may import, by the maps of public packages."""
    found = {pair for path in SRC.rglob("__init__.pyi") for pair in names_of_map(path).items()}
    for name, path in FILES.items():
        shown = re.search(r"^__all__ = \[(.*?)\]", path.read_text(), re.MULTILINE | re.DOTALL)
        if shown and "._" not in f".{name.removesuffix('__init__')}":
            listed = set(re.findall(r'"(\w+)"', shown[1]))
            found |= {pair for pair in names_of_map(path).items() if pair[0] in listed}
    return {(module.removeprefix("unisono."), name) for name, module in found}


def private_imports():
    """Private modules by how often `ABOVE` imports them, but for public names and `unisono.spi`.

    A name in a string counts, too, as those of the table of `tf`. Modules of layer 1 (errors, types, checks
    of arguments, the system) do not count, nor does an import for types alone.
    """
    public, found = public_names(), collections.Counter()
    for name, tree in trees().items():
        own = name.partition(".")[0]
        for path in paths_named_in(tree) if own in ABOVE else []:
            module, _, imported = (path, "", "") if path in MODULES else path.rpartition(".")
            is_own = module.partition(".")[0] == own or (module, imported) in public
            if module in MODULES and "._" in f".{module}" and not is_own and layer_of(module):
                found[module] += 1
    return found


def paths_named_in(tree):
    """The paths below `unisono` of what a file imports, or names in strings, the beginning of a path, too."""
    for node in visited_in(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("unisono"):
            yield from (f"{node.module}.{alias.name}".removeprefix("unisono.") for alias in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"unisono(\.\w+)+\.?", str(node.value)):
            yield node.value.removeprefix("unisono.") + "_" * node.value.endswith(".")


def test_packages_above_the_strategies_use_public_names_and_the_spi():
    found = private_imports()
    assert len(found) == PRIVATE_IMPORTS, f"more: use `unisono.spi`; fewer: lower the number. {sorted(found)}"


def test_the_spi_is_small_and_for_what_is_above():
    assert len(SPI) <= MOST_NAMES
    users = {
        name.partition(".")[0]
        for name, tree in trees().items()
        for node in visited_in(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "unisono.spi"
    }
    assert users <= set(ABOVE)


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


#: The modules and lines that some modules load when they are imported; the numbers may only shrink.
CLOSURES = {"step._compiler": (40, 8_290), "checkpoint._checkpoint": (65, 13_700)}


@pytest.mark.parametrize("name", CLOSURES)
def test_what_a_module_loads_only_shrinks(name):
    """What a program loads that trains is measured in `tests/virtual/test_shut_doors.py`."""
    loaded, waiting = set(), [name]
    while waiting:
        module = waiting.pop()
        if module not in loaded:
            loaded.add(module)
            waiting += loaded_by(module)
    lines = sum(MODULES[module].read_text().count("\n") for module in loaded)
    assert len(loaded) <= CLOSURES[name][0], sorted(loaded)
    assert lines <= CLOSURES[name][1]


def loaded_by(name):
    """The modules that a module imports outside of functions, and not for types alone."""
    inside = {
        node
        for function in nodes_of(trees()[name])
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    imported = [node for node in visited_in(trees()[name]) if node not in inside]
    return modules_in(ast.Module([n for n in imported if isinstance(n, (ast.Import, ast.ImportFrom))], []))


#: The folders and modules of optional features, by the table of the document.
FEATURES = [
    name
    for row in re.findall(r"^\| [^|]+ \| ((?:`[\w.]+`(?:, )?)+) \| [^|]+ \|$", ARCHITECTURE, re.MULTILINE)
    for name in re.findall(r"`([^`]+)`", row)
]

#: How many core modules import an optional feature: those of `strategy.explain`, of named steps, and of files
#: that may lie in an object store. It may only shrink.
NAME_A_FEATURE = 6


def is_optional(name):
    return any(f"{name}.".startswith(f"{feature}.") for feature in FEATURES)


def test_the_core_names_no_feature():
    """But for the table in `_features`, and public maps of names."""
    assert {"sharding", "training.stateful", "parameter_server"} <= set(FEATURES)
    maps = ("experimental", "spi", "testing", "tpu", "strategies._tpu", "__main__")
    core = [n for n in MODULES if not is_optional(n) and n not in maps]
    naming = {name for name in core if any(map(is_optional, own_imports(name)))}
    assert len(naming) == NAME_A_FEATURE, f"more: use `_features`; fewer: lower the number. {sorted(naming)}"


def test_the_table_of_features_names_what_exists():
    table = trees()["_features"].body
    values = next(
        s.value for s in table if isinstance(s, ast.Assign) and s.targets[0].id == "FEATURES"
    ).values
    for path, name in (ast.literal_eval(value).split(":") for value in values):
        module = path.removeprefix("unisono.")
        tree = trees()[module]
        assert name in {getattr(n, "name", "") for n in tree.body} | set(attributes_of(tree)), (
            f"{path}:{name}"
        )


@pytest.mark.parametrize("door", DOORS)
def test_doors(door):
    for name, tree in trees().items():
        if door.startswith("import "):
            module = door.removeprefix("import ")
            uses = any(i == module or i.startswith(module + ".") for i in imports_of(tree))
        else:
            uses = door in imports_of(tree) or door in attributes_of(tree)
        allowed = any(name == d or name.startswith(d + ".") for d in DOORS[door])
        assert allowed or not uses, f"{name} uses {door}, which belongs to {DOORS[door]}"


def names_of_classes(tree):
    """The names that a file gives to Keras' and JAX' classes, in loops, by `next(…)` and `type(…)`, too."""
    found = set()
    while True:
        before = len(found)
        for node in nodes_of(tree):
            pairs = [(node.target, node.iter)] if isinstance(node, (ast.For, ast.comprehension)) else []
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
                pairs = [(t, node.value) for t in getattr(node, "targets", None) or [node.target]]
            for target, value in pairs:
                calls = isinstance(value, ast.Call) and ast.unparse(value.func) not in ("next", "type")
                if not calls and names_a_class(value, found):
                    found |= {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
        if len(found) == before:
            return found


def names_a_class(value, known=()):
    """Whether an expression names `keras.Model` or `jax.Array`, or a name for one, and not what they have."""
    inner = [getattr(value, field, None) for field in ("elts", "args", "values", "body", "orelse")]
    parts = [value, *(part for each in inner for part in (each if isinstance(each, list) else [each]))]
    parts += [g.iter for part in parts for g in getattr(part, "generators", ())]
    texts = [ast.unparse(part).removesuffix(".__mro__") for part in parts if part is not None]
    return any(t in known or re.fullmatch(r"(keras|jax)(\.\w+)*\.[A-Z]\w*", t) for t in texts)


def assigned_owners(tree):
    """What a file assigns attributes of, with `setattr` and `vars(...)[...]`, too."""
    statements = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)
    for node in nodes_of(tree):
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr"):
            yield node.args[0]
        for target in targets if isinstance(node, statements) else []:
            owner = target.value if isinstance(target, (ast.Attribute, ast.Subscript)) else None
            is_vars = isinstance(owner, ast.Call) and ast.unparse(owner.func) == "vars"
            if owner is not None:
                yield owner.args[0] if is_vars else owner


def test_classes_of_others_are_changed_in_one_file():
    """What is assigned by a function that gets the class, `tests/unit/system/test_replacements.py` sees."""
    for name, tree in trees().items():
        known = names_of_classes(tree)
        found = [ast.unparse(o) for o in assigned_owners(tree) if names_a_class(o, known)]
        found += [o for o in map(ast.unparse, assigned_owners(tree)) if re.match(r"(keras|jax)\.", o)]
        assert not found, f"{name} assigns to {found}: use a table, which `_replacements.put` puts in place"


@pytest.mark.parametrize(
    "code",
    [
        "keras.Model.x = 1",
        "setattr(keras.Model, name, 1)",
        "kind = keras.optimizers.Optimizer\nkind.x = 1",
        "base = next(b for b in keras.Model.__mro__ if b)\nbase.x = 1",
        "kinds = (jax.Array, keras.Layer)\nfor kind in kinds:\n    kind.x = 1",
        "for kind in (type(keras.Model()), keras.Sequential):\n    vars(kind)['x'] = 1",
    ],
)
def test_assignments_to_classes_are_found(code):
    tree = ast.parse(code)
    assert any(names_a_class(o, names_of_classes(tree)) for o in assigned_owners(tree))


def private_names_of_keras():
    """The table in `step/_keras_internals`."""
    statements = trees()["step._keras_internals"].body
    table = next(s.value for s in statements if isinstance(s, ast.Assign) and s.targets[0].id == "RELIED_ON")
    # An attribute `_model` is every second class' own.
    entries = [entry for entries in ast.literal_eval(table).values() for entry in entries]
    return {entry.partition("(")[0] for entry in entries} - {"_model"}


def test_private_names_of_keras_occur_in_one_file():
    """And as names of what is wrapped, in the files that say so in a function `wraps`."""
    names = private_names_of_keras()
    for name, tree in trees().items():
        uses = {n.attr for n in nodes_of(tree) if isinstance(n, ast.Attribute)}
        functions = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
        if "wraps" not in functions:
            uses |= {n.value for n in nodes_of(tree) if isinstance(n, ast.Constant)}
        assert name == "step._keras_internals" or not uses & names, (name, uses & names)


def test_only_installing_asks_the_file_of_wraps():
    """Who owns a model or variable is asked in `training/_binding`."""
    taken = {
        (name, alias.name)
        for name, tree in trees().items()
        for node in nodes_of(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "unisono.training._bind"
        for alias in node.names
    }
    modules = (
        "strategies._base", "callbacks._backup", "training.named_steps._replica_runner",
    )  # fmt: skip
    assert taken == {(module, "wrap_keras") for module in modules}


#: How often code asks whether a process is alone, in place of calling its `ProcessGroup`. It may only shrink.
COMPARED_SIZES = 18


def test_code_asks_the_group_and_not_its_size():
    found = [
        name
        for name, path in MODULES.items()
        for _ in re.findall(r"group\.size [<>=!]+ 1\b", path.read_text())
    ]
    assert len(found) == COMPARED_SIZES, f"more: call a method of the group; fewer: lower it. {found}"


#: The largest share of annotations that name `Any`, or an alias of it, in percent. They may only shrink.
UNCHECKED = {"estimator": 23, "feature_column": 6, "tf": 28, "other packages": 13}


@functools.cache
def aliases_of_any(name):
    """The names that a module gives to `Any`."""
    return {
        ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
        for node in trees()[name].body
        if isinstance(node, (ast.AnnAssign, ast.Assign)) and getattr(node.value, "id", "") == "Any"
    }


def unchecked_annotations(name):
    """For each annotation of a module, whether it names `Any` or an alias of it."""
    nodes, names = nodes_of(trees()[name]), {"Any", *aliases_of_any(name)}
    for node in nodes:
        module = (getattr(node, "module", None) or "").removeprefix("unisono.")
        if isinstance(node, ast.ImportFrom) and module in FILES:
            names |= {alias.name for alias in node.names} & aliases_of_any(module)
    found = [getattr(n, "annotation", None) or getattr(n, "returns", None) for n in nodes]
    return [any(getattr(n, "id", "") in names for n in ast.walk(each)) for each in found if each]


def test_annotations_say_what_a_value_is():
    """A type checker checks nothing of `Any`: a value that is passed through unread is an `object`."""
    found = collections.defaultdict(list)
    for name in FILES:
        package = name.partition(".")[0]
        found[package if package in UNCHECKED else "other packages"] += unchecked_annotations(name)
    shares = {package: 100 * sum(each) / len(each) for package, each in found.items()}
    assert not {package: share for package, share in shares.items() if share > UNCHECKED[package]}, shares


def test_files_are_short():
    lengths = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    assert not {name: length for name, length in lengths.items() if length > 500}


def test_folders_are_short():
    """About fifteen files: more is a flat list that a reader has to search."""
    counted = (name for name in MODULES if not name.endswith("__main__"))
    folders = collections.Counter(name.rpartition(".")[0] for name in counted)
    assert not {folder: count for folder, count in folders.items() if count > 17}


def test_a_class_name_has_one_meaning():
    """Also without a private class's underscore. `experimental` has old constructors of two strategies."""
    homes = collections.defaultdict(list)
    for name, tree in trees().items():
        for node in nodes_of(tree):
            if isinstance(node, ast.ClassDef) and name != "experimental":
                homes[node.name.lstrip("_")].append(name)
    assert not {name: found for name, found in homes.items() if len(found) > 1}


def functions():
    for name, tree in trees().items():
        for node in nodes_of(tree):
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
    for name, tree in trees().items():
        assert not any(isinstance(n, ast.Assert) for n in nodes_of(tree)), name


def test_a_private_module_has_tests_or_says_where_they_are():
    """A file of its name anywhere in `tests`, or a last paragraph `Tests: <paths>` in its docstring."""
    for name in (n for n in MODULES if n.rpartition(".")[2].startswith("_")):
        own = name.rpartition(".")[2].strip("_")
        has_code = any(isinstance(n, (ast.ClassDef, ast.FunctionDef)) for n in nodes_of(trees()[name]))
        if not has_code or own == "main" or f"test_{own}.py" in TEST_FILES:
            continue
        last = (ast.get_docstring(trees()[name]) or "").rpartition("\n\n")[2]
        paths = re.findall(r"tests/[\w/]+\.py", last) if last.startswith("Tests: ") else []
        assert paths, f"add tests/.../test_{own}.py, or `Tests: <path>.` at the end of {name}'s docstring"
        assert all((ROOT / path).exists() for path in paths), f"{name}: {last}"


#: Words of a parable. What to write instead is in CONTRIBUTING.md: name the subject, use the field's verbs.
PARABLE = re.compile(
    r"\b(nobody|somebody|anybody|whoever|strangers?|in vain|hears?|heard|farewell|good-bye|begins? anew)\b",
    re.IGNORECASE,
)


#: The same in identifiers, and a flag whose noun is missing.
PARABLE_WORDS = re.compile(
    "nobody|somebody|anybody|whoever|strangers?|vain|hears?|heard|farewell|greet(s|ed|ing)?|told|anew",
    re.IGNORECASE,
)
PARABLE_NAMES = {"is_users"}
#: Kinds of tokens, of Python 3.12's f-strings, too.
TEXTS = {kind for kind, name in tokenize.tok_name.items() if re.search("COMMENT|STRING", name)}


def words_of(identifier):
    """Such as `heard`, `at` of `_heard_at`, and `row`, `initial` of `RowInitial`."""
    return re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", identifier)


def test_texts_are_plain():
    """Docstrings, comments, messages and identifiers."""
    names = collections.defaultdict(set)
    for file, path in FILES.items():
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type in TEXTS:
                found = PARABLE.search(token.string)
                assert not found, f"{file}, line {token.start[0]}: {found[0]!r}"
            elif token.type == tokenize.NAME:
                names[token.string].add(file)
    for name, files in names.items():
        found = name in PARABLE_NAMES or any(PARABLE_WORDS.fullmatch(word) for word in words_of(name))
        assert not found, f"{name} in {files}"


#: Participles and adjectives: those on `ed`, but not the verb `Proceed`, and these.
NO_NOUN = re.compile(
    "(?!Proceed).*[a-z]{2}ed|Apart|Aside|Asking|Begun|Counting|Done|Doing|Found|Given|Going|Gone|Growing|Held|"
    "Hidden|Kept|Known|Lost|Made|Missing|Passing|Running|Seen|Sent|Shown|Taken|Told|Total|Waiting|Whole|Written"
)
#: Names of tf.distribute, and kinds of an entry in tables that are read as sentences; it may only shrink.
NO_NOUNS = {"Mirrored", "StrategyExtended", "Missing", "Mixed", "Reduced"}


def test_class_names_are_nouns():
    """No participle alone, as `Found`: what was found? `FoundModel` names it."""
    names = {n.name for tree in trees().values() for n in nodes_of(tree) if isinstance(n, ast.ClassDef)}
    assert {name for name in names if NO_NOUN.fullmatch(words_of(name)[-1])} == NO_NOUNS


def test_strategies_override_only_what_the_recipe_names():
    """All but the default strategy, which stands for code outside of every scope."""
    table = ARCHITECTURE.partition("| member | override it |")[2].partition("\n\n")[0]
    allowed = {"__init__", *re.findall(r"`(\w+)`", "".join(re.findall(r"^\|([^|]*)\|", table, re.MULTILINE)))}
    classes = {
        node.name: {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
        for name, tree in trees().items()
        for node in tree.body
        if re.search(r"(^strategies|\.strategy)\.", name) and isinstance(node, ast.ClassDef)
    }
    bases = {"Strategy", "ReplicatedStrategy", "DeprecatedMethods"}
    common = set().union(*(classes[name] for name in bases))
    strategies = {name for name in classes if name.endswith("Strategy")} - bases - {"DefaultStrategy"}
    assert len(strategies) >= 5
    assert allowed - {"__init__"} <= common | {"_runs_ahead"}
    for name in strategies:
        assert classes[name] & common <= allowed, f"{name} overrides {classes[name] & common - allowed}"
    public = {name for name in classes["Strategy"] & classes["ReplicatedStrategy"] if name[0] != "_"}
    from_mesh = {"num_replicas_in_sync", "worker_devices", "_replicated", "_gather_state"}
    assert public <= allowed | from_mesh, f"ReplicatedStrategy overrides {public - allowed - from_mesh}"


def test_test_files_have_names_of_their_own():
    """pytest imports those in folders without an `__init__.py` by their names alone."""
    tests = [p for p in (ROOT / "tests").rglob("test_*.py") if not (p.parent / "__init__.py").exists()]
    names = collections.Counter(path.name for path in tests)
    assert not {name for name, count in names.items() if count > 1}
