"""`import unisono` is a lazy map of the public names."""

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import jedi
import pytest
from tests import reference

import unisono

SRC = Path(unisono.__file__).parent
MODULES = [
    ".".join(("unisono", *path.relative_to(SRC).with_suffix("").parts)).removesuffix(".__init__")
    for path in sorted(SRC.rglob("*.pyi"))
    # Those of TensorFlow's names are made from their table: tests/unit/tf/test_stubs.py.
    if not path.is_relative_to(SRC / "tf")
]


@pytest.mark.parametrize("name", MODULES)
def test_each_name_of_a_stub_is_loaded(name):
    module = importlib.import_module(name)
    assert dir(module) == module.__all__ == sorted(set(module.__all__))
    for public in module.__all__:
        assert getattr(module, public) is not None, public


def test_the_reference_is_that_of_the_code():
    assert reference.PAGE.read_text() == reference.page(), "run `python -m tests.reference`"
    assert reference.TF_PAGE.read_text() == reference.tf_page(), "run `python -m tests.reference`"


def on_the_page():
    """The names of each module on the page of names, with the members of classes."""
    sections = reference.PAGE.read_text().split("\n## `")[1:]
    return {
        section.partition("`")[0]: {
            name: set(re.findall(r"`(\w+)`", row.partition(" Members: ")[2]))
            for name, row in re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE)
        }
        for section in sections
    }


ON_THE_PAGE = on_the_page()


@pytest.mark.parametrize("module", reference.modules("unisono"), ids=lambda module: module.__name__)
def test_dir_shows_the_names_of_the_reference_alone(module):
    assert {name for name in dir(module) if name[0] != "_"} == ON_THE_PAGE[module.__name__].keys()


def test_dir_of_a_class_shows_the_members_of_the_reference_alone():
    """Machinery begins with an underscore. What other packages' classes have is theirs."""
    documented = {
        getattr(sys.modules[module], name): members
        for module, names in ON_THE_PAGE.items()
        for name, members in names.items()
        if inspect.isclass(getattr(sys.modules[module], name))
    }
    for cls in (cls for cls in documented if cls.__module__.startswith("unisono")):
        known = set().union(*(documented.get(base, ()) for base in cls.__mro__))
        others = (base for base in cls.__mro__ if not base.__module__.startswith("unisono"))
        known |= {name for base in others for name in dir(base)}
        assert not {name for name in dir(cls) if name[0] != "_"} - known, cls


def undescribed(function):
    """The parameters that the `Args` of a docstring leave out; none where it has no `Args`."""
    _, _, section = (inspect.getdoc(function) or "").partition("\nArgs:\n")
    names = re.findall(r"^    \*{0,2}(\w+):", section.partition("\n\n")[0], re.MULTILINE)
    return set(inspect.signature(function).parameters) - {*names, "self", "cls"} if names else set()


@pytest.mark.parametrize("name", MODULES)
def test_args_of_public_functions_are_complete(name):
    module = importlib.import_module(name)
    for public in module.__all__:
        value = getattr(module, public)
        found = vars(value).items() if inspect.isclass(value) else [(public, value)]
        for inside, function in ((n, getattr(f, "__func__", f)) for n, f in found if n[0] != "_"):
            if inspect.isfunction(function) and function.__module__.startswith("unisono"):
                assert not undescribed(function), f"{name}.{public}: {inside}"


#: What works only in a cluster, in a model_fn, or in a subclass; tests show these.
WITHOUT_EXAMPLE = {
    "unisono.coordinator": {
        "ClusterCoordinator", "PerWorkerValue", "PerWorkerValues", "RemoteValue", "get_current_worker_index",
    },
    "unisono.estimator.losses": {
        "add_loss", "get_losses", "get_regularization_loss", "get_regularization_losses", "get_total_loss",
    },
    "unisono.estimator.summary": {"histogram", "image", "merge", "merge_all", "scalar", "text"},
    "unisono.estimator.train": {
        "Saver", "create_global_step", "get_or_create_global_step", "init_from_checkpoint",
    },
    "unisono.feature_column": {"linear_model"},
    "unisono.spi": {"ProcessGroup"},
    "unisono.standalone": {"StandardServer", "run_on_cluster"},
}  # fmt: skip


@pytest.mark.parametrize("module", reference.modules("unisono"), ids=lambda module: module.__name__)
def test_public_classes_and_functions_have_an_example(module):
    """Of a class one in its methods is enough. Errors say what to write; what is made has its maker's."""
    without = set()
    for name, value in reference.public(module):
        is_made = inspect.isfunction(value) and value.__code__.co_name != name
        if is_made or not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        parts = [value, *vars(value).values()] if inspect.isclass(value) else [value]
        examples = ">>> " in "".join(str(getattr(part, "__doc__", "")) for part in parts)
        if not (examples or (inspect.isclass(value) and issubclass(value, BaseException))):
            without.add(name)
    assert without == WITHOUT_EXAMPLE.get(module.__name__, set())


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("unisono.Mirr", {"Mirrored", "MirroredStrategy"}),
        ("unisono.data.Data", {"Dataset", "DatasetCreator", "DatasetSpec"}),
        ("unisono.MirroredStrategy().num_rep", {"num_replicas_in_sync"}),
        ("unisono.get_strategy().redu", {"reduce"}),
        ("unisono.callbacks.", {"BackupAndRestore", "StepTimer", "TensorBoard", "set_peak_flops"}),
    ],
)
def test_editors_complete_names(program, expected):
    found = jedi.Script(f"import unisono\n{program}").complete()
    assert {c.name for c in found if not c.name.startswith("_")} == expected


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="MirorredStrategy"):
        unisono.MirorredStrategy  # noqa: B018


def test_import_starts_neither_jax_nor_keras_and_strategies_neither_grain_nor_orbax():
    code = (
        "import sys, os; os.environ.pop('KERAS_BACKEND', None); import unisono\n"
        "assert not {'jax', 'keras', 'grain', 'numpy'} & set(sys.modules)\n"
        "assert os.environ['KERAS_BACKEND'] == 'jax'\n"
        "unisono.MirroredStrategy, unisono.ParameterServerStrategy\n"
        "assert not {'grain', 'orbax'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_another_backend_is_an_error():
    code = (
        "import sys, types; k = types.ModuleType('keras'); k.config = types.SimpleNamespace(\n"
        "  backend=lambda: 'torch'); sys.modules['keras'] = k; import unisono._backend as b\n"
        "b.require_jax()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert "Received: keras.config.backend()='torch'" in done.stderr


def test_another_backend_is_an_error_before_its_package_is_imported():
    code = "import os; os.environ['KERAS_BACKEND'] = 'torch'; import unisono; unisono.MirroredStrategy"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert "BackendError: Keras must run on the JAX backend. Received: KERAS_BACKEND='torch'" in done.stderr
