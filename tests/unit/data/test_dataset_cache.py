"""`cache()`: what is computed once, and a file that is whole or not there."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono.data import Dataset

Point = collections.namedtuple("Point", ["x", "y"])

ELEMENTS = [
    (1, Point("a", 2.5)),
    {"n": np.arange(6, dtype=np.uint8).reshape(2, 3), "s": np.array([b"x\0", b""], object), "none": None},
    np.datetime64("2020-01-01"),
    {"empty": np.zeros((0, 3), np.float32), "deep": ({"big": np.arange(3, dtype=">f8")},)},
]


def _noting(seen: list[int]) -> Any:
    def note(x: Any) -> Any:
        seen.append(int(x))
        return x

    return note


@pytest.mark.parametrize("kind", ["indexed", "stream"])
@pytest.mark.parametrize("where", ["memory", "file"])
def test_each_element_is_computed_once(kind: str, where: str, tmp_path: Path) -> None:
    seen: list[int] = []
    source = Dataset.range(6) if kind == "indexed" else Dataset.range(12).filter(lambda x: x < 6)
    dataset = source.map(_noting(seen)).cache(str(tmp_path / "cache") if where == "file" else "")
    if kind == "indexed":
        next(iter(dataset))
    for _ in range(3):
        assert [int(x) for x in dataset] == list(range(6))
    assert seen == list(range(6))
    assert [int(x) for x in dataset.shuffle(6, seed=1).batch(4).unbatch()] != list(range(6))
    assert len(seen) == 6


def test_a_file_appears_only_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "cache"
    dataset = Dataset.range(6).cache(str(path))
    iterator = iter(dataset)
    next(iterator)
    assert not path.exists()
    assert len(list(path.parent.iterdir())) == 1
    list(dataset)
    assert [entry.name for entry in path.parent.iterdir()] == ["cache"]


def test_an_unfinished_file_is_removed(tmp_path: Path) -> None:
    dataset = Dataset.range(6).cache(str(tmp_path / "cache"))
    iterator = iter(dataset)
    next(iterator)
    del iterator, dataset
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_read_instead_of_the_pipeline(tmp_path: Path) -> None:
    path = str(tmp_path / "cache")
    list(Dataset.range(6).cache(path))
    seen: list[int] = []
    again = Dataset.range(100, 106).map(_noting(seen)).cache(path)
    assert [int(x) for x in again] == list(range(6))
    assert seen == []


@pytest.mark.parametrize("element", ELEMENTS, ids=["tuple", "dict", "date", "deep"])
def test_elements_come_back_equal(element: Any, tmp_path: Path) -> None:
    source = Dataset.from_source([element])
    (original,) = source
    for _ in range(2):
        (stored,) = source.cache(str(tmp_path / "cache"))
        assert repr(stored) == repr(original)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("shopping list")
    with pytest.raises(InvalidArgumentError, match="13 bytes that are not a complete cache"):
        list(Dataset.range(3).cache(str(path)))
    list(Dataset.range(6).cache(str(tmp_path / "cache")))
    whole = (tmp_path / "cache").read_bytes()
    (tmp_path / "torn").write_bytes(whole[:-1])
    with pytest.raises(InvalidArgumentError, match="not a complete cache"):
        list(Dataset.range(6).cache(str(tmp_path / "torn")))


def test_dtypes_that_numpy_cannot_name_stay_in_memory(tmp_path: Path) -> None:
    import jax.numpy as jnp

    dataset = Dataset.from_tensors(jnp.zeros(2, jnp.bfloat16))
    assert next(iter(dataset.cache())).dtype == jnp.bfloat16
    with pytest.raises(InvalidTypeError, match="bfloat16"):
        list(dataset.cache(str(tmp_path / "cache")))


def test_cached_elements_cannot_be_changed() -> None:
    dataset = Dataset.range(3).map(lambda x: np.full(2, x)).cache()
    for element in dataset:
        with pytest.raises(ValueError, match="read-only"):
            np.add(element, 1, out=element)
    assert [x.tolist() for x in dataset] == [[0, 0], [1, 1], [2, 2]]


def test_a_restored_iterator_brings_its_order_into_the_cache() -> None:
    def build() -> Dataset:
        return Dataset.range(20).shuffle(20, seed=1).cache()

    one, other = build(), build()
    first = iter(one)
    head = [int(next(first)) for _ in range(5)]
    state = first.get_state()
    list(other)
    second = iter(other)
    second.set_state(state)
    rest = [int(x) for x in second]
    assert sorted(head + rest) == list(range(20))
    assert [int(x) for x in other] == head + rest
