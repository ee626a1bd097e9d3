"""Packages beside TensorFlow: which are adapted, and what an error says of the others."""

import importlib
import importlib.util
import sys
import types

import pytest

import unisono.tf
from unisono.tf.packages import _finder
from unisono.tf.packages._datasets import adapt
from unisono.tf.packages._finder import PackageFinder, adapt_packages, explain_missing_package


def test_the_finder_is_asked_after_unisono_tf_was_imported():
    assert unisono.tf.__name__ in sys.modules
    assert any(isinstance(finder, PackageFinder) for finder in sys.meta_path)
    with pytest.raises(ModuleNotFoundError, match=r"needs TensorFlow. Use `keras.applications`, `keras_hub`"):
        importlib.import_module("tensorflow_hub")


def test_a_missing_package_is_named_with_its_extra():
    finder = PackageFinder(has_tensorflow=True)
    assert finder.find_spec("tensorflow_text") is None
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'unisono\[datasets\]'"):
        finder.find_spec("tensorflow_datasets", path=[])


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("tensorflow_addons", "Keras 3's own layers and optimizers"),
        ("official.nlp", "TensorFlow's model garden"),
        ("tensorflow_gan", "a package of Keras 3 or JAX"),
        ("tensorflow_datasets", None),  # which says itself what to install
        ("numpy_of_mine", None),
        (None, None),
    ],
)
def test_an_import_that_ends_the_program_says_what_to_use(name, advice):
    error = ModuleNotFoundError("No module", name=name)
    explain_missing_package(error)
    assert [advice in note for note in getattr(error, "__notes__", [])] == [True] * (advice is not None)


def test_who_only_asks_for_a_package_gets_an_answer():
    assert any(isinstance(finder, PackageFinder) for finder in sys.meta_path)
    assert importlib.util.find_spec("tensorflow_addons") is None


def test_tensorflow_hub_is_found_where_tensorflow_may_be(tmp_path):
    (tmp_path / "tensorflow_hub.py").write_text("")
    assert PackageFinder(has_tensorflow=True).find_spec("tensorflow_hub", path=[str(tmp_path)]) is None
    with pytest.raises(ModuleNotFoundError, match="needs TensorFlow"):
        PackageFinder(has_tensorflow=False).find_spec("tensorflow_hub", path=[str(tmp_path)])


@pytest.mark.parametrize("is_package", [True, False])
def test_what_was_imported_before_is_adapted(monkeypatch, is_package):
    module = types.ModuleType("tensorflow_datasets")
    if is_package:
        module.__path__ = []
    adapted = []
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(_finder, "_adapt", adapted.append)
    adapt_packages()
    # A module of that name without a path is a program's own.
    assert adapted == [module] * is_package


def test_another_version_is_named(monkeypatch):
    tfds = pytest.importorskip("tensorflow_datasets")
    used = tfds.core.DatasetBuilder.download_and_prepare
    adapt(tfds)
    assert tfds.core.DatasetBuilder.download_and_prepare is used
    monkeypatch.delattr(tfds.core.dataset_builder, "FileReaderBuilder")
    with pytest.raises(unisono.UnsupportedError, match=f"Received: {tfds.__version__} .*FileReaderBuilder"):
        adapt(tfds)


def test_einops_looks_at_arrays_before_it_sees_tensorflow(tmp_path, monkeypatch):
    (tmp_path / "einops.py").write_text(
        "import sys\nseen = []\n"
        "def rearrange(x, pattern):\n    seen.append('tensorflow' in sys.modules)\n    return x\n"
    )
    monkeypatch.setitem(sys.modules, "tensorflow", types.ModuleType("tensorflow"))
    spec = PackageFinder(has_tensorflow=False).find_spec("einops", path=[str(tmp_path)])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.seen == [False]
    assert "tensorflow" in sys.modules
    assert PackageFinder(has_tensorflow=False).find_spec("einops", path=[]) is None
