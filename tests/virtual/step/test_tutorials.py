# ruff: noqa: B905 (the loops are as they are there)
"""Loops of TensorFlow's tutorials as they are written there, with other imports and small data.

The numbers are those of one device.
"""

import types

import keras
import numpy as np
import pytest

import unisono
from tests.support import count_compiles

#: What the tutorials import.
tf = types.SimpleNamespace(
    function=unisono.function,
    GradientTape=unisono.GradientTape,
    distribute=unisono,
    data=unisono.data,
    keras=keras,
    errors=types.SimpleNamespace(OutOfRangeError=unisono.OutOfRangeError),
    cast=keras.ops.cast,
    convert_to_tensor=keras.ops.convert_to_tensor,
    ones_like=keras.ops.ones_like,
    zeros_like=keras.ops.zeros_like,
    nn=unisono.nn,
    random=keras.random,
    reduce_mean=keras.ops.mean,
    abs=keras.ops.abs,
    range=range,
)

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(14, 6)).astype(np.float32)
LABELS = RANDOM.integers(0, 3, 14)
#: 14 rows: batches of 4, 4, 4 and 2.
GLOBAL_BATCH_SIZE = 4


@pytest.fixture(params=["one", "two"])
def strategy(request):
    if request.param == "one":
        return tf.distribute.OneDeviceStrategy("cpu:0")
    return tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture(scope="module")
def known():
    """What the first strategy, one device, gave."""
    return {}


def check(known, name, numbers):
    expected = known.setdefault(name, numbers)
    np.testing.assert_allclose(numbers, expected, rtol=2e-5, atol=1e-6)


def dataset():
    return tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(GLOBAL_BATCH_SIZE)


def create_model():
    return tf.keras.Sequential([tf.keras.layers.Dense(5, activation="relu"), tf.keras.layers.Dense(3)])


def test_custom_training_loop(strategy, known):
    """Of "Custom training with tf.distribute.Strategy", with its ways to iterate."""
    keras.utils.set_random_seed(1)
    train_dist_dataset = strategy.experimental_distribute_dataset(dataset())
    test_dist_dataset = strategy.experimental_distribute_dataset(dataset())
    with strategy.scope():
        loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

        def compute_loss(labels, predictions, model_losses):
            per_example_loss = loss_object(labels, predictions)
            loss = tf.nn.compute_average_loss(per_example_loss)
            if model_losses:
                loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))
            return loss

        test_loss = tf.keras.metrics.Mean(name="test_loss")
        train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
        test_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")
        model = create_model()
        optimizer = tf.keras.optimizers.Adam(learning_rate=0.01)

    def train_step(inputs):
        images, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = compute_loss(labels, predictions, model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        train_accuracy.update_state(labels, predictions)
        return loss

    def test_step(inputs):
        images, labels = inputs
        predictions = model(images, training=False)
        t_loss = loss_object(labels, predictions)
        test_loss.update_state(t_loss)
        test_accuracy.update_state(labels, predictions)

    @tf.function
    def distributed_train_step(dataset_inputs):
        per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)

    @tf.function
    def distributed_test_step(dataset_inputs):
        return strategy.run(test_step, args=(dataset_inputs,))

    @tf.function
    def distributed_train_epoch(dataset):
        total_loss = 0.0
        num_batches = 0
        for x in dataset:
            per_replica_losses = strategy.run(train_step, args=(x,))
            total_loss += strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)
            num_batches += 1
        return total_loss / tf.cast(num_batches, dtype="float32")

    numbers = []
    for _ in range(2):
        total_loss, num_batches = 0.0, 0
        for x in train_dist_dataset:
            total_loss += distributed_train_step(x)
            num_batches += 1
        train_loss = total_loss / num_batches
        for x in test_dist_dataset:
            distributed_test_step(x)
        numbers += [float(train_loss), float(train_accuracy.result()), float(test_loss.result())]
        numbers += [float(test_accuracy.result())]
        test_loss.reset_state()
        train_accuracy.reset_state()
        test_accuracy.reset_state()
    # "Iterating using iterators" and "Iterating inside a tf.function".
    train_iter = iter(train_dist_dataset)
    numbers += [float(distributed_train_step(next(train_iter))) for _ in range(3)]
    numbers.append(float(distributed_train_epoch(train_dist_dataset)))
    with count_compiles() as compiled:
        numbers += [float(distributed_train_epoch(train_dist_dataset)) for _ in range(2)]
    assert not compiled
    assert len(set(numbers[-3:])) == 3
    check(known, "custom training", numbers)


def test_distributed_input(strategy, known):
    """Of "Distributed Input": iterators, `get_next_as_optional`, `element_spec`."""
    dist_dataset = strategy.experimental_distribute_dataset(dataset())
    numbers = []

    def replica_sum(inputs):
        return keras.ops.sum(inputs[0])

    def summed(per_replica):
        return sum(float(x) for x in strategy.experimental_local_results(per_replica))

    @tf.function(input_signature=[dist_dataset.element_spec])
    def train_step(per_replica_inputs):
        return strategy.run(replica_sum, args=(per_replica_inputs,))

    for x in dist_dataset:
        numbers.append(summed(train_step(x)))

    @tf.function
    def train_fn(distributed_iterator, steps_per_loop):
        for _ in tf.range(steps_per_loop):
            optional_data = distributed_iterator.get_next_as_optional()
            if not optional_data.has_value():
                break
            per_replica_results = strategy.run(lambda x: replica_sum(x), args=(optional_data.get_value(),))
            numbers.append(summed(per_replica_results))

    train_fn(iter(dist_dataset), 10)
    iterator = iter(dist_dataset)
    numbers += [summed(train_step(iterator.get_next())) for _ in range(4)]
    with pytest.raises(tf.errors.OutOfRangeError):
        iterator.get_next()
    assert numbers[:4] == pytest.approx([IMAGES[i : i + 4].sum() for i in range(0, 14, 4)], rel=1e-4)
    assert len(numbers) == 12
    check(known, "distributed input", numbers)


def test_tpu_guide(strategy, known):
    """Of "Use TPUs": the input pipeline in the function, and several steps in one call."""
    keras.utils.set_random_seed(2)
    per_replica_batch_size = GLOBAL_BATCH_SIZE // strategy.num_replicas_in_sync
    data = tf.data.Dataset.from_tensor_slices((IMAGES[:12], LABELS[:12])).repeat()
    train_dataset = strategy.distribute_datasets_from_function(lambda _: data.batch(per_replica_batch_size))
    with strategy.scope():
        model = create_model()
        optimizer = tf.keras.optimizers.Adam()
        training_loss = tf.keras.metrics.Mean("training_loss")
        training_accuracy = tf.keras.metrics.SparseCategoricalAccuracy("training_accuracy")

    @tf.function
    def train_multiple_steps(iterator, steps):
        def step_fn(inputs):
            images, labels = inputs
            with tf.GradientTape() as tape:
                logits = model(images, training=True)
                per_example_loss = tf.keras.losses.sparse_categorical_crossentropy(
                    labels, logits, from_logits=True
                )
                loss = tf.nn.compute_average_loss(per_example_loss)
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(list(zip(grads, model.trainable_variables)))
            training_loss.update_state(loss * strategy.num_replicas_in_sync)
            training_accuracy.update_state(labels, logits)

        for _ in tf.range(steps):
            strategy.run(step_fn, args=(next(iterator),))

    train_iterator = iter(train_dataset)
    numbers = []
    programs = []
    for _ in range(3):
        train_multiple_steps(train_iterator, tf.convert_to_tensor(3))
        numbers += [float(training_loss.result()), float(training_accuracy.result())]
        training_loss.reset_state()
        training_accuracy.reset_state()
        programs.append(strategy.num_programs)
    # `step_fn` is a new function in each call, and compiled once.
    assert programs == [1, 1, 1]
    check(known, "TPU guide", numbers)


@pytest.mark.exhaustive  # `test_unbuilt_models.py` has two models, `test_tape.py` a persistent tape
def test_cycle_gan(strategy, known):
    """Of "CycleGAN": four models that the first step builds, and one persistent tape."""
    keras.utils.set_random_seed(3)

    def network(rows):
        return tf.keras.Sequential([tf.keras.layers.Dense(4, activation="tanh"), tf.keras.layers.Dense(rows)])

    with strategy.scope():
        generator_g, generator_f = network(6), network(6)
        discriminator_x, discriminator_y = network(1), network(1)
        models = [generator_g, generator_f, discriminator_x, discriminator_y]
        optimizers = [tf.keras.optimizers.Adam(2e-2, beta_1=0.5) for _ in models]
        loss_obj = tf.keras.losses.BinaryCrossentropy(from_logits=True)

    def cycle_loss(real, cycled):
        return 10 * tf.reduce_mean(tf.abs(real - cycled)) / strategy.num_replicas_in_sync

    def train_step(real_x, real_y):
        with tf.GradientTape(persistent=True) as tape:
            fake_y = generator_g(real_x, training=True)
            cycled_x = generator_f(fake_y, training=True)
            fake_x = generator_f(real_y, training=True)
            cycled_y = generator_g(fake_x, training=True)
            disc_fake_x = discriminator_x(fake_x, training=True)
            disc_fake_y = discriminator_y(fake_y, training=True)
            disc_real_x = discriminator_x(real_x, training=True)
            disc_real_y = discriminator_y(real_y, training=True)
            total_cycle_loss = cycle_loss(real_x, cycled_x) + cycle_loss(real_y, cycled_y)
            losses = [
                loss_obj(tf.ones_like(disc_fake_y), disc_fake_y) + total_cycle_loss,
                loss_obj(tf.ones_like(disc_fake_x), disc_fake_x) + total_cycle_loss,
                loss_obj(tf.ones_like(disc_real_x), disc_real_x)
                + loss_obj(tf.zeros_like(disc_fake_x), disc_fake_x),
                loss_obj(tf.ones_like(disc_real_y), disc_real_y)
                + loss_obj(tf.zeros_like(disc_fake_y), disc_fake_y),
            ]
        for loss, model, optimizer in zip(losses, models, optimizers, strict=True):
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return losses

    horses = tf.data.Dataset.from_tensor_slices(IMAGES[:8]).batch(GLOBAL_BATCH_SIZE)
    zebras = tf.data.Dataset.from_tensor_slices(IMAGES[4:12]).batch(GLOBAL_BATCH_SIZE)
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.zip((horses, zebras)))

    @tf.function
    def train_epoch(dataset):
        return [strategy.run(train_step, args=batch) for batch in dataset]

    losses = [loss for _ in range(2) for batch in train_epoch(data) for loss in batch]
    numbers = [sum(float(x) for x in strategy.experimental_local_results(loss)) for loss in losses]
    check(known, "CycleGAN", numbers)
    assert strategy.num_programs == 1


def test_dcgan():
    """Of "Deep Convolutional Generative Adversarial Network": tapes in the function itself, without `run`."""
    keras.utils.set_random_seed(4)
    generator = tf.keras.Sequential(
        [tf.keras.layers.Dense(8), tf.keras.layers.LeakyReLU(), tf.keras.layers.Dense(6)]
    )
    discriminator = tf.keras.Sequential(
        [tf.keras.layers.Dense(4), tf.keras.layers.Dropout(0.3), tf.keras.layers.Dense(1)]
    )
    cross_entropy = tf.keras.losses.BinaryCrossentropy(from_logits=True)
    # Keras on JAX wants a generator where TensorFlow has a global one.
    seed = tf.random.SeedGenerator(5)
    generator_optimizer = tf.keras.optimizers.Adam(1e-2)
    discriminator_optimizer = tf.keras.optimizers.Adam(1e-2)

    @tf.function
    def train_step(images):
        noise = tf.random.normal([GLOBAL_BATCH_SIZE, 3], seed=seed)
        with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
            generated_images = generator(noise, training=True)
            real_output = discriminator(images, training=True)
            fake_output = discriminator(generated_images, training=True)
            gen_loss = cross_entropy(tf.ones_like(fake_output), fake_output)
            disc_loss = cross_entropy(tf.ones_like(real_output), real_output)
            disc_loss += cross_entropy(tf.zeros_like(fake_output), fake_output)
        gradients_of_generator = gen_tape.gradient(gen_loss, generator.trainable_variables)
        gradients_of_discriminator = disc_tape.gradient(disc_loss, discriminator.trainable_variables)
        generator_optimizer.apply_gradients(zip(gradients_of_generator, generator.trainable_variables))
        discriminator_optimizer.apply_gradients(
            zip(gradients_of_discriminator, discriminator.trainable_variables)
        )
        return generated_images

    dataset = tf.data.Dataset.from_tensor_slices(IMAGES[:12]).shuffle(12).batch(GLOBAL_BATCH_SIZE)
    generated = [np.asarray(train_step(batch)) for _ in range(2) for batch in dataset]
    assert train_step.num_programs == 1
    # Noise is drawn anew in each step.
    assert len({image.tobytes() for image in generated}) == 6
    assert int(generator_optimizer.iterations.value) == 6
