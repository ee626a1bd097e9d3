"""Random colors of `tf.image`; what is not random, tests/unit/tf/operations.txt compares with TensorFlow."""

import jax
import numpy as np
import pytest

from unisono import UnisonoError, tf

IMAGE = np.random.default_rng(0).uniform(size=(2, 4, 5, 3)).astype("float32")


@pytest.mark.parametrize(
    ("name", "arguments", "adjust"),
    [
        ("brightness", (0.3,), lambda x, i: x + i * 0.3),
        ("contrast", (0.5, 1.5), lambda x, i: tf.image.adjust_contrast(x, 1 + i / 2)),
        ("saturation", (0.5, 1.5), lambda x, i: tf.image.adjust_saturation(x, 1 + i / 2)),
        ("hue", (0.2,), lambda x, i: tf.image.adjust_hue(x, i * 0.2)),
    ],
)
def test_random_colors_lie_in_their_range(name, arguments, adjust):
    change = getattr(tf.image, f"random_{name}")
    made = [np.asarray(change(IMAGE, *arguments, seed=s)) for s in range(4)]
    assert not np.allclose(made[0], made[1])
    np.testing.assert_array_equal(made[2], change(IMAGE, *arguments, seed=2))
    # The one number that was drawn explains the whole image.
    for image in made:

        def error(i, image=image):
            return np.abs(np.asarray(adjust(IMAGE, i)) - image).max()

        near = min(np.linspace(-1, 1, 21), key=error)
        assert min(map(error, near + np.linspace(-0.1, 0.1, 41))) < 5e-3
    # As part of a compiled step, too.
    assert jax.jit(lambda x: change(x, *arguments, seed=1))(IMAGE).shape == IMAGE.shape


def test_colors_there_and_back():
    np.testing.assert_allclose(tf.image.hsv_to_rgb(tf.image.rgb_to_hsv(IMAGE)), IMAGE, atol=1e-5)
    whole = (IMAGE * 255).astype("uint8")
    assert tf.image.random_brightness(whole, 0.2).dtype == "uint8"
    assert tf.image.adjust_brightness(whole, 2.0).numpy().min() == 255


def test_ranges_that_are_none():
    with pytest.raises(UnisonoError, match=r"`upper` must be at least 0\.9"):
        tf.image.random_contrast(IMAGE, 0.9, 0.5)
    with pytest.raises(UnisonoError, match="`max_delta` must be at least 0"):
        tf.image.random_hue(IMAGE, -0.1)
