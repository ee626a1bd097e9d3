"""Names from outside lead to files below a folder, or nowhere, before anything is written."""

import re
import stat
import tempfile
import zipfile
from pathlib import Path

import fsspec
import keras
import pytest

import unisono
from unisono import InvalidArgumentError
from unisono._system._file_names import name_problem, names_problem, paths_below
from unisono._system._object_store import local_copy, place_of

SOURCES = Path(unisono.__file__).parent
OUTSIDE = ["/home/x/.bashrc", "../../../x", "a/../../x", "..", "a/..", ".", "./a", "", "a//b", "a/"]
STRANGE = [
    "C:/x",
    "c:x",
    "\\\\host\\x",
    "..\\x",
    "a\0b",
    "a\nb",
    "\ud800",
    "x" * 256,
    "a/" * 600 + "a",
    None,
    7,
]
STRANGE += [["a"], {"a": 1}, "/".join("a" * 60)]


@pytest.mark.parametrize("name", [*OUTSIDE, *STRANGE])
def test_a_name_that_leads_elsewhere_is_none(name, tmp_path):
    assert name_problem(name) is not None
    with pytest.raises(InvalidArgumentError, match=r"must lie below it.*Nothing was written"):
        paths_below(tmp_path, ["fine", name], "the manifest")


@pytest.mark.parametrize(
    "name", ["a", "a/b.c", "..a", "a..", "data-1/arrays.safetensors", "größe/ü", "a b", "-"]
)
def test_a_name_below_is_the_path_of_a_file_there(name, tmp_path):
    assert paths_below(tmp_path, [name], "") == {name: tmp_path / name}


def test_a_file_is_no_folder_of_another(tmp_path):
    assert names_problem(["a/b", "a/c", "ab"]) is None
    assert names_problem(["a/b/c", "a"]) == "the file 'a' is also the folder of 'a/b/c'"


@pytest.mark.parametrize(
    "names", [["a/Weights", "a/weights"], ["\u00e9", "e\u0301"], ["A/x", "a/y", "a/X"], ["Data/x", "data"]]
)
def test_names_of_one_file_on_another_file_system(names, tmp_path):
    """macOS and Windows take both for one file, and the second would be written over the first."""
    assert "are one file on some systems" in names_problem(names)
    with pytest.raises(InvalidArgumentError, match="Nothing was written"):
        paths_below(tmp_path, names, "the listing")


def test_a_name_leads_through_no_link(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "link").symlink_to(tmp_path)
    (tmp_path / "own" / "file").symlink_to(tmp_path / "other")
    for name in ("link/x", "link", "file"):
        with pytest.raises(InvalidArgumentError, match="through a link"):
            paths_below(tmp_path / "own", [name], "")
    # The folder itself may be reached by one.
    assert paths_below(tmp_path / "own" / "link", ["x"], "")


def test_no_other_place_takes_names_for_paths():
    """Objects are copied to names of the caller's own, or by `download_below`; archives are not unpacked."""
    texts = {path.stem: path.read_text() for path in SOURCES.rglob("*.py")}
    assert {name for name, text in texts.items() if ".download(" in text} == {"_object_store", "_store"}
    assert not [name for name, text in texts.items() if re.search(r"extractall|unpack_archive|tarfile", text)]


@pytest.mark.parametrize("name", ["../../../escaped", "{}/escaped", "a/../../../escaped"])
def test_keys_of_a_bucket_are_copied_below_or_not_at_all(name, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "inner"))
    (tmp_path / "inner").mkdir()
    client = fsspec.filesystem("memory")
    client.store.clear()
    client.pipe_file("/bucket/model/manifest.json", b"{}")
    # As it is: `pipe_file` would change it, which stores do not.
    key = f"/bucket/model/{name.format(tmp_path)}"
    client.store[key] = type(client.store["/bucket/model/manifest.json"])(client, key, b"evil")
    try:
        with (
            pytest.raises(InvalidArgumentError, match="escaped"),
            local_copy(place_of("memory://bucket/model")),
        ):
            pass
    finally:
        client.store.clear()
    assert [path.name for path in tmp_path.rglob("*")] == ["inner"]


def test_members_of_a_keras_file_are_written_below_its_temporary_folder(tmp_path, monkeypatch):
    """Keras leaves out names that lead elsewhere, and `zipfile` makes no links."""
    made = tmp_path / "made.keras"
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).save(made)
    outside = ["../../escaped", f"{tmp_path}/escaped", "assets/../../../escaped", "assets/link"]
    with zipfile.ZipFile(made, "a") as archive:
        for name in outside:
            member = zipfile.ZipInfo(name)
            member.external_attr = (stat.S_IFLNK | 0o777) << 16 if name.endswith("link") else 0
            archive.writestr(member, str(tmp_path))
    (tmp_path / "inner").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "inner"))
    with pytest.warns(UserWarning, match="Skipping invalid path"):
        keras.models.load_model(made)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inner", "made.keras"]
    assert not [path for path in tmp_path.rglob("*") if path.is_symlink()]
