"""What a careful user of JAX writes around a model of Keras: one compiled step, its state donated."""

import os

from peers import Peer

#: Steps after which the host waits for the devices.
AHEAD = 16


def start(place):
    os.environ["KERAS_BACKEND"] = "jax"
    import jax

    if place.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", place.devices)
    import jax.numpy as jnp
    import keras
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    keras.config.set_dtype_policy(place.policy)
    x, y = place.data()
    model, loss_fn, optimizer = place.workload.keras_model(), place.workload.loss(), keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    mesh = Mesh(np.array(jax.local_devices(backend=place.platform)[: place.devices]), ("replica",))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("replica"))

    def loss_of(trainable, other, x, y):
        outputs, other = model.stateless_call(trainable, other, x, training=True)
        return loss_fn(y, outputs), (jnp.mean(outputs.argmax(-1) == y), other)

    def mean(value):
        is_float = jnp.issubdtype(value.dtype, jnp.floating)  # and no state of a random generator
        return jax.lax.pmean(value, "replica") if is_float and place.devices > 1 else value

    def step(state, x, y):
        trainable, other, slots = state
        (loss, (accuracy, other)), grads = jax.value_and_grad(loss_of, has_aux=True)(trainable, other, x, y)
        grads, other, loss, accuracy = jax.tree.map(mean, (grads, other, loss, accuracy))
        trainable, slots = optimizer.stateless_apply(slots, grads, trainable)
        # As it was given: for another structure JAX would trace the step again.
        return [list(part) for part in (trainable, other, slots)], (loss, accuracy)

    if place.devices > 1:
        specs = {"in_specs": (P(), P("replica"), P("replica")), "out_specs": P()}
        step = jax.shard_map(step, mesh=mesh, check_vma=False, **specs)
    compiled = jax.jit(step, donate_argnums=0, out_shardings=whole)
    variables = model.trainable_variables, model.non_trainable_variables, optimizer.variables
    # Copies: what is donated must not be what Keras' variables hold.
    carried = [jax.device_put([[np.asarray(v) for v in group] for group in variables], whole)]
    rng, made = np.random.default_rng(1), [0]

    def epoch(rows=None):
        order = rng.permutation(len(x))[: rows or len(x)]
        logs = []
        for number, start in enumerate(range(0, len(order), place.batch)):
            chosen = order[start : start + place.batch]
            carried[0], log = compiled(carried[0], *jax.device_put((x[chosen], y[chosen]), split))
            logs.append(log)
            made[0] += 1
            if number % AHEAD == AHEAD - 1:
                log[0].block_until_ready()
        return [sum(float(value) for value in values) for values in zip(*logs, strict=True)]

    return Peer(
        first=lambda: epoch(place.batch),
        actions={"fit": (epoch, len(x))},
        steps=lambda: made[0],
        training={"fit": place.workload.steps},
    )
