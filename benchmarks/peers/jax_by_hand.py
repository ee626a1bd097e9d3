"""What a careful user of JAX and Optax writes: shard_map, one all-reduce, donation, bounded run-ahead."""

from peers import Peer


def start(place):
    import jax

    if place.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"127.0.0.1:{place.port}"
        jax.distributed.initialize(
            address, place.processes, place.rank, cluster_detection_method="deactivate"
        )
    else:
        jax.config.update("jax_num_cpu_devices", place.devices)
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.flatten_util import ravel_pytree
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    x, y = place.data()
    mesh = Mesh(np.array(jax.devices()), ("replica",))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("replica"))
    params, apply = place.workload.jax_model(jax.random.key(0))
    optimizer = optax.adam(1e-3)

    def loss_of(params, x, y):
        logits = apply(params, x)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return loss, jnp.mean(logits.argmax(-1) == y)

    def all_reduced(values):
        if place.processes == 1:  # in one process one call per array is the faster way
            return jax.lax.pmean(values, "replica")
        flat, unravel = ravel_pytree(values)
        return unravel(jax.lax.pmean(flat, "replica"))

    def step(params, state, x, y):
        (loss, accuracy), grads = jax.value_and_grad(loss_of, has_aux=True)(params, x, y)
        grads, loss, accuracy = all_reduced((grads, loss, accuracy))
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, accuracy

    specs = (P(), P(), P("replica"), P("replica"))
    sharded = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    compiled = jax.jit(sharded, donate_argnums=(0, 1))

    def everywhere(value):
        value = np.asarray(value)
        return jax.make_array_from_callback(value.shape, whole, lambda i: value[i])

    def placed(*arrays):
        if place.processes == 1:
            return jax.device_put(arrays, split)
        return [jax.make_array_from_process_local_data(split, a) for a in arrays]

    carried = list(jax.tree.map(everywhere, (params, optimizer.init(params))))
    rng = np.random.default_rng(1)
    own, made = place.batch // place.processes, [0]

    def epoch(rows=None):
        order = rng.permutation(len(x))[: rows or len(x)]
        losses = []
        for number, start in enumerate(range(0, len(order), place.batch)):
            mine = order[start : start + place.batch][place.rank * own : (place.rank + 1) * own]
            *carried[:], loss, accuracy = compiled(*carried, *placed(x[mine], y[mine]))
            losses.append((loss, accuracy))
            made[0] += 1
            if number % 16 == 15:
                loss.block_until_ready()
        return [sum(float(value) for value in values) for values in zip(*losses, strict=True)]

    return Peer(
        first=lambda: epoch(place.batch),
        actions={"fit": (epoch, len(x)), "loop": (epoch, len(x))},
        steps=lambda: made[0],
        training=dict.fromkeys(["fit", "loop"], place.workload.steps),
    )
