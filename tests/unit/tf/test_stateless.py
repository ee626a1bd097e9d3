"""Random numbers of a seed that is given each time, and generators."""

import jax
import numpy as np
import pytest

from unisono import UnisonoError, tf

IMAGE = np.random.default_rng(0).uniform(size=(4, 4, 3)).astype("float32")


@pytest.mark.parametrize("name", ["stateless_normal", "stateless_truncated_normal", "stateless_uniform"])
def test_the_same_seed_gives_the_same_numbers(name):
    draw = getattr(tf.random, name)
    first = np.asarray(draw([3], seed=(1, 2)))
    np.testing.assert_array_equal(first, draw([3], tf.constant([1, 2])))
    np.testing.assert_array_equal(first, jax.jit(lambda seed: draw([3], seed=seed))(np.array([1, 2])))
    assert not np.array_equal(first, draw([3], seed=(1, 3)))


def test_integers_in_a_range():
    drawn = np.asarray(tf.random.stateless_uniform([50], (1, 2), 3, 6, tf.int32))
    assert set(drawn) == {3, 4, 5}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("brightness", (0.3,)), ("contrast", (0.1, 0.9)), ("hue", (0.2,)), ("saturation", (0.1, 0.9)),
        ("crop", ((2, 2, 3),)), ("flip_left_right", ()), ("flip_up_down", ()),
    ],
)  # fmt: skip
def test_augmentations(name, arguments):
    augment = getattr(tf.image, f"stateless_random_{name}")
    results = [np.asarray(augment(IMAGE, *arguments, seed=(i, 7))) for i in range(6)]
    np.testing.assert_array_equal(results[0], augment(IMAGE, *arguments, (0, 7)))
    assert len({r.tobytes() for r in results}) > 1


def test_a_seed_of_another_shape():
    with pytest.raises(UnisonoError, match=r"two integers. Received: seed of shape \(\)"):
        tf.random.stateless_normal([2], seed=3)


def test_generators():
    one, other = (tf.random.Generator.from_seed(5, alg="philox") for _ in range(2))
    for draw in ("normal", "uniform", "truncated_normal"):
        first, second = (np.asarray(getattr(one, draw)([4])) for _ in range(2))
        np.testing.assert_array_equal(first, getattr(other, draw)([4]))
        np.testing.assert_array_equal(second, getattr(other, draw)([4]))
        assert not np.array_equal(first, second)
    one.reset_from_seed(5)
    other.reset_from_seed(5)
    np.testing.assert_array_equal(one.make_seeds(2), other.make_seeds(2))
    assert one.make_seeds(3).shape == (2, 3)
    parts = one.split(2)
    assert not np.array_equal(parts[0].normal([2]), parts[1].normal([2]))
    assert tf.random.split((1, 2), 3).shape == (3, 2)


def test_the_global_generator():
    tf.random.set_global_generator(tf.random.Generator.from_seed(1))
    expected = tf.random.Generator.from_seed(1).normal([2])
    np.testing.assert_array_equal(tf.random.get_global_generator().normal([2]), expected)


def test_a_generator_in_a_function_goes_on():
    generator = tf.random.Generator.from_seed(1)
    step = tf.function(lambda: generator.normal([2]))
    assert not np.array_equal(step(), step())


def test_a_generator_that_each_step_makes_begins_again():
    strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])

    def step():
        generator = tf.random.Generator.from_seed(1)
        return generator.normal([]), generator.normal([])

    expected = [float(x) for x in step()]
    for _ in range(2):
        for part in strategy.run(step):
            assert [float(x) for x in strategy.experimental_local_results(part)] == [expected.pop(0)] * 2
        expected = [float(x) for x in step()]


def test_a_generator_is_restored(tmp_path):
    generator = tf.random.Generator.from_seed(1)
    assert generator.state.numpy().tolist() == [1, 0]
    generator.normal([])
    path = tf.train.Checkpoint(generator=generator).write(str(tmp_path / "saved"))
    expected = float(generator.normal([]))
    other = tf.random.Generator.from_seed(5)
    tf.train.Checkpoint(generator=other).restore(path)
    assert float(other.normal([])) == expected


def test_names_of_operations_and_dtypes_by_position():
    assert tf.random.stateless_normal([2], (1, 2), 0.0, 1.0, "float16").dtype == "float16"
    assert tf.random.stateless_uniform([2], (1, 2), name="draw").shape == (2,)
    assert tf.random.Generator.from_seed(1).normal([2], name="draw").shape == (2,)
    assert tf.concat([[1.0], [2.0]], 0, "joined").tolist() == [1.0, 2.0]
