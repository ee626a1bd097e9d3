"""Artefacts on disk: sealed, checked, written at once."""

import json

import pytest

from unisono import _errors
from unisono._export._files import (
    MANIFEST,
    describe_files,
    read_file,
    read_manifest,
    replace_atomically,
    seal,
    unseal,
)

BODY = {"name": "größe", "inputs": [1, None, {"a": "b"}]}


def artefact(folder, version=1):
    with replace_atomically(folder, marker=MANIFEST) as aside:
        aside.mkdir()
        (aside / "data.bin").write_bytes(b"0123456789")
        body = {"files": describe_files(aside, ["data.bin"])}
        (aside / MANIFEST).write_text(seal("kind", version, body), encoding="utf-8")
    return folder


def whole(folder):
    manifest = read_manifest(folder, "kind", 1)
    return read_file(folder, "data.bin", manifest["files"])


def test_a_manifest_comes_back(tmp_path):
    assert unseal(seal("kind", 1, BODY).encode(), tmp_path / MANIFEST, "kind", 1) == BODY


def test_an_older_version_is_read(tmp_path):
    assert unseal(seal("kind", 1, BODY).encode(), tmp_path, "kind", 3) == BODY


def test_an_artefact_comes_back(tmp_path):
    assert whole(artefact(tmp_path / "new" / "model")) == b"0123456789"


@pytest.mark.parametrize("name", [MANIFEST, "data.bin"])
def test_any_flipped_byte_is_found(tmp_path, name):
    """Every byte of the data, and of the manifest all that are not mere layout."""
    file = artefact(tmp_path / "model") / name
    original = file.read_bytes()
    for position, byte in enumerate(original):
        if chr(byte).isspace():
            continue
        file.write_bytes(original[:position] + bytes([byte ^ 1]) + original[position + 1 :])
        with pytest.raises(_errors.InvalidArgumentError, match=name):
            whole(tmp_path / "model")


@pytest.mark.parametrize("name", [MANIFEST, "data.bin"])
@pytest.mark.parametrize("keep", [0, 1, 9])
def test_a_file_that_was_cut_off_is_named(tmp_path, name, keep):
    file = artefact(tmp_path / "model") / name
    file.write_bytes(file.read_bytes()[:keep])
    message = rf"{name}' must be unchanged since it was written. Received"
    with pytest.raises(_errors.InvalidArgumentError, match=message):
        whole(tmp_path / "model")


@pytest.mark.parametrize("name", [MANIFEST, "data.bin"])
def test_a_missing_file_is_named(tmp_path, name):
    (artefact(tmp_path / "model") / name).unlink()
    with pytest.raises(_errors.InvalidArgumentError, match=name):
        whole(tmp_path / "model")


def test_a_missing_folder(tmp_path):
    with pytest.raises(_errors.InvalidArgumentError, match=r"must be a directory with 'manifest.json'"):
        whole(tmp_path / "nothing")


def test_a_newer_format_says_to_upgrade(tmp_path):
    with pytest.raises(_errors.InvalidArgumentError, match=r"manifest.json.*at most 1.*version=2.*--upgrade"):
        whole(artefact(tmp_path / "model", version=2))


def test_another_kind(tmp_path):
    with pytest.raises(_errors.InvalidArgumentError, match="format 'other'"):
        read_manifest(artefact(tmp_path / "model"), "other", 1)


@pytest.mark.parametrize("text", ["[]", "3", '{"format": "kind"}', "{", "\udcff"])
def test_what_is_no_manifest(tmp_path, text):
    with pytest.raises(_errors.InvalidArgumentError, match="must be unchanged since it was written"):
        unseal(text.encode(errors="surrogateescape"), tmp_path / MANIFEST, "kind", 1)


def test_a_failure_leaves_what_was_there(tmp_path):
    folder = artefact(tmp_path / "model")

    def write():
        with replace_atomically(folder, marker=MANIFEST) as aside:
            aside.mkdir()
            (aside / "half").write_bytes(b"0")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write()
    assert whole(folder) == b"0123456789"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_an_artefact_is_replaced_and_nothing_stays_behind(tmp_path):
    folder = artefact(tmp_path / "model")
    with replace_atomically(folder, marker=MANIFEST) as aside:
        aside.mkdir()
        (aside / MANIFEST).write_text("second")
    assert [p.name for p in folder.iterdir()] == [MANIFEST]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_file_is_replaced(tmp_path):
    target = tmp_path / "model.keras"
    for text in ("first", "second"):
        with replace_atomically(target) as aside:
            assert aside.suffix == ".keras"
            aside.write_text(text)
    assert [p.read_text() for p in tmp_path.iterdir()] == ["second"]


def test_other_files_are_not_overwritten(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(_errors.InvalidArgumentError, match="nothing else is overwritten"):
        with replace_atomically(tmp_path, marker=MANIFEST):
            pass
    with pytest.raises(_errors.InvalidArgumentError, match="`path` must be a file"):
        with replace_atomically(tmp_path):
            pass
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_the_manifest_is_for_readers_too(tmp_path):
    text = (artefact(tmp_path / "model") / MANIFEST).read_text()
    record = json.loads(text)
    assert list(record) == ["format", "version", "sha256", "body"]
    assert len(text.splitlines()) > 5
