import numpy as np
import pytest

from unisono.cluster._batch_fingerprint import SIZE, are_near, fingerprint

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(512, 784)).astype("f4")
LABELS = RNG.integers(0, 10, 512)


def near(*batches):
    prints = [fingerprint(batch) for batch in batches]
    assert {len(p) for p in prints} == {SIZE}
    return are_near(prints)


def test_rounding_is_not_a_difference():
    with np.errstate(all="ignore"):
        assert near([IMAGES, LABELS], [np.nextafter(IMAGES, np.float32(9)), LABELS.copy()])
    assert near([], [])
    assert near([np.zeros((4, 2))], [np.zeros((4, 2))])
    odd = np.array([np.nan, np.inf, 1.0])
    assert near([odd], [odd.copy()])


@pytest.mark.parametrize(
    "other",
    [
        [IMAGES[::-1], LABELS],
        [IMAGES + 1, LABELS],
        [IMAGES, LABELS[::-1]],
        [IMAGES.astype("f8"), LABELS],
        [np.roll(IMAGES, 1, axis=0), LABELS],
        [np.concatenate([IMAGES[:-4], IMAGES[:4]]), LABELS],
        [IMAGES * np.where(np.arange(512) == 3, np.nan, 1)[:, None].astype("f4"), LABELS],
        [LABELS, IMAGES],
    ],
)
def test_other_data(other):
    assert not near([IMAGES, LABELS], [IMAGES, LABELS], other)


def test_small_and_unusual_arrays():
    assert not near([np.array([1.0, 2.0])], [np.array([2.0, 1.0])])
    assert not near([np.array([1j, 2.0])], [np.array([2.0, 1j])])
    assert not near([np.array(["a", "b"])], [np.array(["b", "a"])])
    assert not near([np.array([True, False])], [np.array([False, True])])
    # Objects are told by their shape: the same object may be written in two ways.
    assert near([np.array([object()])], [np.array([object()])])
    assert near([None], [None])
