"""A custom loop with `unisono.GradientTape`, as in TensorFlow's tutorial."""

from peers import Peer


def start(place):
    import unisono

    strategy = unisono.MirroredStrategy([f"cpu:{i}" for i in range(place.devices)])
    import keras

    x, y = place.data()

    def batches(rows):
        dataset = unisono.data.Dataset.from_tensor_slices((x[:rows], y[:rows]))
        return strategy.distribute_dataset(dataset.shuffle(rows, seed=1).batch(place.batch))

    with strategy.scope():
        model = place.workload.keras_model()
        loss_fn = keras.losses.SparseCategoricalCrossentropy()
        optimizer = keras.optimizers.Adam()
        accuracy = keras.metrics.SparseCategoricalAccuracy()

    def train_step(inputs):
        features, labels = inputs
        with unisono.GradientTape() as tape:
            predictions = model(features, training=True)
            loss = loss_fn(labels, predictions)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(labels, predictions)
        return loss

    @unisono.function
    def distributed_train_step(inputs):
        losses = strategy.run(train_step, args=(inputs,))
        return strategy.reduce(unisono.ReduceOp.SUM, losses, axis=None)

    def epoch(dataset):
        accuracy.reset_state()
        losses = [distributed_train_step(batch) for batch in dataset]
        return float(sum(losses)), float(accuracy.result())

    dataset = batches(len(x))
    return Peer(
        first=lambda: epoch(batches(place.batch)),
        actions={"loop": (lambda: epoch(dataset), len(x))},
        steps=lambda: int(optimizer.iterations),
        training={"loop": place.workload.steps},
    )
