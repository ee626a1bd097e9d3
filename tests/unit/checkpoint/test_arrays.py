"""What Orbax writes and reads; most is shown with whole checkpoints."""

import numpy as np
import pytest

from unisono.checkpoint import _arrays

ARRAYS = {"a": np.arange(3.0), "b": np.ones((2, 2), "int32")}


def fail_once(monkeypatch, error):
    save, errors = _arrays._save, [error]

    def failing(folder, arrays):
        save(folder, arrays)
        if errors:
            raise errors.pop()

    monkeypatch.setattr(_arrays, "_save", failing)


@pytest.mark.parametrize("error", [TimeoutError("after 86400.03 seconds"), ValueError("NOT_FOUND: d/1")])
def test_a_clock_that_jumps_while_orbax_writes_and_a_file_that_is_not_found(
    tmp_path, monkeypatch, caplog, error
):
    fail_once(monkeypatch, error)
    _arrays.save_arrays(tmp_path, ARRAYS)
    found = _arrays.load_arrays(tmp_path)
    assert {name: value.tolist() for name, value in found.items()} == {"a": [0, 1, 2], "b": [[1, 1], [1, 1]]}
    assert f"are written once more, as Orbax failed: {error}" in caplog.text


def test_other_errors_are_raised(tmp_path, monkeypatch):
    fail_once(monkeypatch, ValueError("a leaf"))
    with pytest.raises(ValueError, match="a leaf"):
        _arrays.save_arrays(tmp_path, ARRAYS)


def test_an_odd_temporary_directory_is_not_taken_for_links(tmp_path, monkeypatch):
    """Orbax and TensorStore read some characters of a path as others."""
    odd = tmp_path / "a ü"
    odd.mkdir()
    monkeypatch.setattr(_arrays.tempfile, "gettempdir", lambda: str(odd))
    monkeypatch.setattr(_arrays.tempfile, "tempdir", str(odd))
    _arrays.save_arrays(odd, ARRAYS)
    assert _arrays.load_arrays(odd)["a"].tolist() == [0, 1, 2]
    assert _arrays._plain_temporary_directory() in ("/tmp", "/var/tmp", "/dev/shm")


def test_one_file_leaves_to_orbax_what_its_format_lacks(tmp_path):
    arrays = {"a": np.arange(3.0), "b": np.array([1 + 2j]), "c": np.zeros((0, 2), "float32")}
    staged, rest = _arrays.stage_arrays(tmp_path / "aside", arrays, None)
    assert sorted(rest) == ["b", "c"]
    _arrays.save_arrays(tmp_path, rest, file=staged)
    found = _arrays.load_arrays(tmp_path)
    assert {n: (a.dtype.name, np.asarray(a).tolist()) for n, a in found.items()} == {
        "a": ("float64", [0, 1, 2]), "b": ("complex128", [1 + 2j]), "c": ("float32", []),
    }  # fmt: skip
