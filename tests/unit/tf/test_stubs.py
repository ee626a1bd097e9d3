"""The stubs of `unisono.tf`: made from the table of names, and read by editors."""

import ast
import importlib

import jedi
import pytest
from tools import stubs

from unisono.tf._entries import Missing
from unisono.tf._table import TABLE

MADE = stubs.stubs()
WRITTEN = {str(path.relative_to(stubs.ROOT)): path.read_text() for path in stubs.ROOT.rglob("*.pyi")}
#: Names of Keras' modules are those of one version.
IS_THAT_KERAS = f"with Keras {stubs.KERAS}," in WRITTEN["keras/__init__.pyi"]


def names_in(text):
    """The names that a stub has for others."""
    found = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom):
            found |= {a.asname for a in node.names if a.asname}
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            found.add(ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target))
    return {name for name in found if not name.startswith("_") or name.startswith("__")}


def module_of(path):
    return ".".join(path.removesuffix(".pyi").removesuffix("__init__").rstrip("/").split("/"))


def test_they_are_those_of_the_table():
    same = {path: text for path, text in WRITTEN.items() if IS_THAT_KERAS or "with Keras" not in text}
    assert same == {path: MADE[path] for path in same}, "run `python -m tools.stubs`"
    assert not IS_THAT_KERAS or WRITTEN.keys() == MADE.keys(), "run `python -m tools.stubs`"


def test_each_name_of_the_table_is_in_a_stub():
    known = {
        f"{module_of(path)}.{name}".lstrip(".") for path, text in WRITTEN.items() for name in names_in(text)
    }
    expected = {name for name, entry in TABLE.entries.items() if not isinstance(entry, Missing)}
    assert len(expected) > 1000
    assert expected <= known
    assert not {name for name, entry in TABLE.entries.items() if isinstance(entry, Missing)} & known


@pytest.mark.skipif(not IS_THAT_KERAS, reason="the stubs are those of another Keras")
def test_each_name_of_a_stub_is_there():
    """A module that needs packages which are not installed says so."""
    for path, text in WRITTEN.items():
        module = importlib.import_module(f"unisono.tf.{module_of(path)}".rstrip("."))
        for name in names_in(text):
            assert hasattr(module, name), f"{path}: {name}"


@pytest.mark.parametrize(
    ("begun", "expected"),
    [
        ("distribute.Mirr", {"MirroredStrategy"}),
        ("distribute.experimental.", {"CentralStorageStrategy", "TerminationConfig", "partitioners"}),
        ("keras.layers.Dens", {"Dense", "DenseFeatures"}),
        ("keras.optimizers.legacy.", {"Adam", "SGD"}),
        ("data.Dataset.from_", {"from_tensor_slices", "from_generator"}),
        ("estimator.Est", {"Estimator", "EstimatorSpec"}),
        ("io.gfile.", {"exists", "makedirs"}),
        ("reduce_", {"reduce_sum", "reduce_mean"}),
        ("compat.v1.train.Ada", {"AdamOptimizer"}),
        ("distribute.MirroredStrategy().num_rep", {"num_replicas_in_sync"}),
    ],
)
def test_editors_complete_names(begun, expected):
    found = {c.name for c in jedi.Script(f"from unisono import tf\ntf.{begun}").complete()}
    assert expected <= found


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("distribute.MirroredStrategy", "mirrored"),
        ("reduce_sum", "sum"),
        ("data.Dataset.from_tensor_slices", "slices"),
        ("keras.layers.Dense", "densely"),
    ],
)
def test_editors_show_documentation(name, words):
    (found, *_) = jedi.Script(text := f"from unisono import tf\ntf.{name}").help(2, len(text.splitlines()[1]))
    assert words in found.docstring().lower()
