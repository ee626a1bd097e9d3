"""Sums that are sent in fewer bytes: nothing is lost, all replicas have the same, and how much is sent."""

import math
import re

import numpy as np
import pytest
from tests.virtual.collectives.test_reduce import AXIS, on_replicas

import unisono
from unisono.collectives._cross_device import CrossDeviceOps
from unisono.compression._compressed_all_reduce import Compression

pytestmark = pytest.mark.numbers

#: 1,001 numbers, which divide neither by replicas nor into blocks, and a kernel of four dimensions.
SHAPES = [(7, 11, 13), (3, 3, 5, 9), (301,)]
KINDS = {
    "bfloat16": Compression("bfloat16", 0, 0),
    "float16": Compression("float16", 0, 0),
    "int8": Compression("int8", 32, 0),
    "power_sgd": Compression("power_sgd", 2, 0),
    "top_k": Compression("top_k", 0.05, 0),
}


def summing(compression, n, in_parts=False):
    """Each replica's sums and errors, of arrays for which a kind is made, jitted."""

    def body(arrays):
        shapes = [s for a in arrays if (s := compression.basis_shape(a.shape))]
        bases = [np.random.default_rng(0).normal(size=s).astype("f4") for s in shapes]
        return compression.sums(
            arrays, bases, CrossDeviceOps(), axis_name=AXIS, axis_size=n, in_parts=in_parts
        )[:2]

    return on_replicas(body, n)


def arrays(compression, n):
    generator = np.random.default_rng(n)
    shapes = [s for s in SHAPES if compression.applies_to(s, "float32")]
    return [generator.normal(size=(n, *s)).astype("f4") * 10.0**-i for i, s in enumerate(shapes)]


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_and_errors_are_what_was_given(kind, n):
    given = arrays(KINDS[kind], n)
    assert len(given) == (2 if kind == "power_sgd" else 3)
    sums, errors = summing(KINDS[kind], n)(given)
    for array, total, error in zip(given, sums, errors, strict=True):
        for other in total[1:]:
            np.testing.assert_array_equal(other, total[0])
        assert np.abs(error).max() > 0
        scale = np.abs(array).max()
        np.testing.assert_allclose(total[0] + error.sum(0), array.sum(0), rtol=0, atol=n * 3e-7 * scale)


#: The largest error of a replica, in parts of the largest number.
STEPS = {"bfloat16": 2**-8, "float16": 2**-11, "int8": 0.5 / 127}


@pytest.mark.parametrize("kind", STEPS)
def test_rounding_is_to_the_nearest(kind):
    given = arrays(KINDS[kind], 2)
    _, errors = summing(KINDS[kind], 2)(given)
    for array, error in zip(given, errors, strict=True):
        limit = STEPS[kind] * np.abs(given[0]).max() if kind == "int8" else STEPS[kind] * np.abs(array)
        assert (np.abs(error) <= limit * 1.0001).all()


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_parts_of_sums(kind):
    """Each replica gets its part; in the second round nothing is rounded, as there is none."""
    given = arrays(KINDS[kind], 3)
    parts, errors = summing(KINDS[kind], 3, in_parts=True)(given)
    for array, part, error in zip(given, parts, errors, strict=True):
        whole = np.asarray(part).reshape(-1)[: array[0].size].reshape(array.shape[1:])
        atol = 1e-6 * np.abs(array).max()
        np.testing.assert_allclose(whole + error.sum(0), array.sum(0), rtol=0, atol=atol)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_so(kind, value):
    given = arrays(KINDS[kind], 3)
    given[0][1].flat[5] = value
    sums, _ = summing(KINDS[kind], 3)(given)
    assert not np.isfinite(sums[0][0]).all()


def test_large_numbers_do_not_overflow_in_float16():
    sums, errors = summing(KINDS["float16"], 2)([np.full((2, 4), 1e5, "f4")])
    np.testing.assert_allclose(sums[0][0] + errors[0].sum(0), 2e5)
    np.testing.assert_array_equal(sums[0], np.full((2, 4), 2 * 65504))


#: What one replica of n sends for so many numbers, in bytes.
SENT = {
    "bfloat16": lambda size, n: 2 * size * 2 * (n - 1) / n,
    "float16": lambda size, n: 2 * size * 2 * (n - 1) / n,
    "int8": lambda size, n: size * (1 + 4 / 32) * 2 * (n - 1) / n,
    "top_k": lambda size, n: 0.05 * size * 8 * (n - 1),
}


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("kind", SENT)
def test_the_program_sends_narrow_integers(kind, n):
    """One message between two replicas; of more, the parts of the sums are scattered and then gathered."""
    given = arrays(KINDS[kind], n)
    text = summing(KINDS[kind], n).lower(given).compile().as_text()
    found = re.findall(r"= \(?([a-z]+)(\d+)\[([\d,]*)\].* (all-gather|all-to-all|all-reduce)\(", text)
    wanted = ["all-gather"] if n == 2 or kind == "top_k" else ["all-gather", "all-to-all"]
    assert sorted({name for *_, name in found}) == wanted, text
    sent = 0.0
    for letter, bits, dims, name in found:
        assert letter in ("u", "s")
        result = int(bits) / 8 * math.prod(map(int, dims.split(",")))
        # XLA:CPU writes the result of an all-to-all as a tuple of what each replica sends.
        sent += result * (n - 1) if name == "all-to-all" else result * (n - 1) / n
    size = sum(a[0].size for a in given)
    assert sent == pytest.approx(SENT[kind](size, n), rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("int4",), r"one of \['bfloat16', .*Received: kind='int4'"),
        (("power_sgd", {"rank": 0}), r'Received: rank=0. Write `CompressedAllReduce\("power_sgd", rank=4\)`'),
        (("power_sgd", {"rank": 1.5}), r"an integer, 1 or more. Received: rank=1.5"),
        (("top_k", {"k": 0}), r"over 0, at most 1. Received: k=0"),
        (("top_k", {"k": 100}), r"Received: k=100. Write .*k=0.01"),
        (("int8", {"block": -1}), r"Received: block=-1"),
        (("int8", {"rank": 2}), r'`rank` is an argument of "power_sgd". Received: rank=2 with kind='),
        (("int8", {"exact_below": -1}), r"Received: exact_below=-1"),
    ],
)
def test_an_argument_out_of_range_is_named(arguments, message):
    kind, options = arguments[0], dict(*arguments[1:])
    with pytest.raises(unisono.InvalidArgumentError, match=message):
        unisono.CompressedAllReduce(kind, **options)


def test_which_gradients_are_compressed():
    compression = unisono.CompressedAllReduce("power_sgd", rank=8, exact_below=400).compression
    shapes = [(10, 10), (3, 3), (100,), (), (2, 2, 40), (64, 64)]
    # Of 10 by 10 two matrices of rank 8 are larger; vectors have no rank.
    assert [s for s in shapes if compression.applies_to(s, "float32")] == [(64, 64)]
    assert not compression.applies_to((64, 64), "bfloat16")
    other = unisono.CompressedAllReduce("int8", exact_below=400).compression
    assert [s for s in shapes if other.applies_to(s, "float32")] == [(10, 10), (100,), (2, 2, 40), (64, 64)]
