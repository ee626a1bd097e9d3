"""Replicas of several TPU cores, and tensors on their logical devices, as in TensorFlow's reference."""

import re

import jax
import keras
import numpy as np
import pytest

import unisono
from tests.support import devices
from unisono.step._keras_internals import stored_value
from unisono.training.trainer._lowered_step import lowered_step

pytestmark = pytest.mark.numbers

L = keras.layers
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
IMAGES = np.random.default_rng(0).normal(size=(12, 8, 16, 3)).astype("float32")
LABELS = np.arange(12) % 5
#: As in TensorFlow's reference, but the block of cores: 8 and 2 logical devices a replica; and 4.
EIGHT, TWO, FOUR = [1, 2, 2, 2], [1, 1, 1, 2], [1, 2, 1, 2]


def tpu(computation_shape, num_replicas, **options):
    count = num_replicas * int(np.prod(computation_shape))
    resolver = unisono.cluster_resolver.TPUClusterResolver(devices=devices(count))
    topology = unisono.tpu.experimental.initialize_tpu_system(resolver)
    build = unisono.tpu.experimental.DeviceAssignment.build
    assignment = build(topology, computation_shape=computation_shape, num_replicas=num_replicas)
    return unisono.TPUStrategy(resolver, experimental_device_assignment=assignment, **options)


def one_device():
    return unisono.TPUStrategy(unisono.cluster_resolver.TPUClusterResolver(devices=devices(1)))


class SplitImages(L.Layer):
    """Splits images over the logical devices of a strategy of several."""

    def __init__(self, strategy, parts):
        super().__init__()
        self.strategy, self.parts = strategy, parts

    def call(self, images):
        if self.strategy.mesh.devices_per_replica == 1:
            return images
        return self.strategy.experimental_split_to_logical_devices(images, self.parts)


def convolutional(strategy, parts):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [SplitImages(strategy, parts), L.Conv2D(4, 3, padding="same", activation="relu")]
        layers += [L.MaxPooling2D(), L.Conv2D(6, 3), L.Flatten(), L.Dense(5)]
        model = keras.Sequential([keras.Input((8, 16, 3)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, 0.9), loss)
    return model


def trained(strategy, parts, rows=12):
    model = convolutional(strategy, parts)
    x, y = IMAGES[:rows], LABELS[:rows]
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    found = [*map(np.asarray, history.history["loss"]), model.predict(x, verbose=0)]
    return model, [*found, *(np.asarray(v) for v in model.variables)]


def assert_close(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, **CLOSE)


@pytest.fixture(scope="module")
def of_one_device():
    return trained(one_device(), None)[1]


@pytest.mark.parametrize(
    ("computation_shape", "replicas", "parts"),
    [
        (FOUR, 2, [1, 2, 2, 1]),
        pytest.param(EIGHT, 1, [1, 2, 4, 1], marks=pytest.mark.exhaustive),
        pytest.param(TWO, 4, [1, 2, 1, 1], marks=pytest.mark.exhaustive),
        # Rows over the logical devices.
        pytest.param(TWO, 2, [2, 1, 1, 1], marks=pytest.mark.exhaustive),
    ],
)
def test_images_in_parts_give_the_numbers_of_one_device(of_one_device, computation_shape, replicas, parts):
    strategy = tpu(computation_shape, replicas, experimental_spmd_xla_partitioning=True)
    assert strategy.num_replicas_in_sync == replicas
    model, found = trained(strategy, parts)
    assert_close(found, of_one_device)
    program = lowered_step(model, IMAGES[:8], LABELS[:8]).compile().as_text()
    rows = 8 // replicas // parts[0]
    # Of the first convolution each device computes its part, and gets lines of pixels from its neighbours.
    height, width = 8 // parts[1], 16 // parts[2]
    shapes = re.findall(r"= f32\[([\d,]+)\]\S* convolution\(.*dim_labels=b01f_01io->b01f", program)
    assert f"{rows},{height},{width},4" in shapes, shapes
    # Nowhere is what a replica's convolution gives as a whole.
    assert f"f32[{8 // replicas},8,16,4]" not in program


def test_a_step_of_run_with_each_of_the_three():
    """The loop of TensorFlow's reference: images split, labels and outputs whole, and a sum on one device."""
    found = []
    for strategy in (one_device(), tpu(FOUR, 2)):
        model = convolutional(strategy, None if strategy.num_replicas_in_sync == 1 else [1, 2, 2, 1])
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        is_one = strategy.num_replicas_in_sync == 1

        def step(batch, strategy=strategy, model=model, loss_fn=loss_fn, is_one=is_one):
            images, labels = batch
            parts = [1, 1, 1, 1] if is_one else [1, 2, 2, 1]
            with unisono.GradientTape() as tape:
                images = strategy.experimental_split_to_logical_devices(images, parts)
                output = model(images, training=True)
                labels = strategy.experimental_replicate_to_logical_devices(labels)
                output = strategy.experimental_replicate_to_logical_devices(output)
                loss = unisono.nn.compute_average_loss(loss_fn(labels, output))
            weights = model.trainable_variables
            model.optimizer.apply(tape.gradient(loss, weights), weights)
            return strategy.experimental_assign_to_logical_device(loss + loss, 0 if is_one else 3)

        # The rows of the last batch differ between the replicas, which then run one after the other.
        batches = [(IMAGES[a:b], LABELS[a:b]) for a, b in ((0, 8), (8, 11))]
        losses = [
            strategy.reduce("SUM", strategy.run(step, args=(b,)), axis=None)
            for b in strategy.distribute_dataset(batches)
        ]
        found.append([*map(np.asarray, losses), *(np.asarray(v) for v in model.variables)])
    assert_close(found[1], found[0])


def test_variables_are_cut_as_a_map_says():
    strategy = tpu(TWO, 2, layout_map={".*dense.*/kernel": ("model", None)})
    model = convolutional(strategy, [1, 2, 1, 1])
    held = stored_value(model.layers[-1].kernel)
    assert {s.data.shape[0] for s in held.addressable_shards} == {held.shape[0] // 2}
    with pytest.raises(unisono.InvalidArgumentError, match="replicas of one device"):
        tpu([1, 1, 1, 1], 2, layout_map={".*": ("model",)})


def test_what_does_not_divide_is_said():
    strategy, x = tpu(FOUR, 1), np.ones((2, 6, 8))
    split = strategy.experimental_split_to_logical_devices
    with pytest.raises(ValueError, match=r"length of `partition_dimensions` must be .*, 3\. Received"):
        split(x, [2, 2])
    for parts in ([1, 2, 1], [1, 2, 4], [-2, -2, 1]):
        with pytest.raises(ValueError, match=r"product of `partition_dimensions` must be .*, 4\. Received"):
            split(x, parts)
    with pytest.raises(ValueError, match=r"partition_dimensions\[1\]` must be divisible"):
        split(x, [1, 4, 1])
    for number in (-1, 4):
        with pytest.raises(ValueError, match=r"must be lower than the number of .*, 4\. Received"):
            strategy.experimental_assign_to_logical_device(x, number)
    with pytest.raises(ValueError, match="in SPMD mode"):
        tpu(FOUR, 1, experimental_spmd_xla_partitioning=True).experimental_assign_to_logical_device(x, 0)
    with pytest.raises(TypeError, match="symbolic tensor of Keras"):
        split(keras.Input((6, 8), batch_size=2), [2, 2, 1])
    # Outside of a step there is nothing to divide.
    assert split(x, [1, 2, 2]) is x
    assert isinstance(split(jax.numpy.asarray(x), [1, 2, 2]), jax.Array)
