"""Which sources travel with a job."""

import importlib.util
import os
import sys

import keras
import numpy as np
import pytest

import unisono
from unisono.standalone import _client
from unisono.standalone._client import given_files, loaded_sources, script_sources


def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_own_modules_travel_and_installed_ones_do_not(tmp_path):
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("A = 1\n")
    (package / "layers.py").write_text("B = 2\n")
    own = {
        "mine": load(package / "__init__.py", "mine"),
        "mine.layers": load(package / "layers.py", "mine.layers"),
    }
    others = {"keras": keras, "numpy": np, "unisono": unisono, "os": os, "sys": sys}
    found = loaded_sources(own | others)
    assert found == {"program/mine/__init__.py": b"A = 1\n", "program/mine/layers.py": b"B = 2\n"}


def test_a_script_brings_what_it_imports_from_its_folder(tmp_path):
    (tmp_path / "train it.py").write_text("import keras, helpers\nfrom models import big\n")
    (tmp_path / "helpers.py").write_text("import deeper\n")
    (tmp_path / "deeper.py").write_text("")
    (tmp_path / "unused.py").write_text("")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("")
    (tmp_path / "models" / "big.py").write_text("")
    found = script_sources(tmp_path / "train it.py")
    names = ["deeper.py", "helpers.py", "models/__init__.py", "models/big.py", "train it.py"]
    assert sorted(found) == [f"program/{name}" for name in names]


def test_a_script_that_cannot_be_compiled_travels_to_the_task_which_shows_it(tmp_path):
    (tmp_path / "broken.py").write_text("def f(:\n")
    assert list(script_sources(tmp_path / "broken.py")) == ["program/broken.py"]


def test_a_missing_script_is_named(tmp_path):
    with pytest.raises(unisono.InvalidArgumentError, match=r"absent\.py"):
        script_sources(tmp_path / "absent.py")


def test_files_by_name(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "words.txt").write_text("a b")
    monkeypatch.chdir(tmp_path)
    assert given_files([_client.Path("data")]) == {"program/data/words.txt": b"a b"}
    os.mkfifo("pipe")
    for bad in ("absent", "../up", str(tmp_path / "data"), "pipe"):
        with pytest.raises(unisono.InvalidArgumentError, match="below the current directory"):
            given_files([_client.Path(bad)])


def test_too_much_is_refused(tuned, tmp_path):
    tuned(_client, _MOST_BYTES=3)
    (tmp_path / "big.py").write_text("1 + 1\n")
    with pytest.raises(unisono.InvalidArgumentError, match=r"the largest program/big\.py"):
        script_sources(tmp_path / "big.py")
