"""How far training on two devices is from one device, where rows relate to each other (docs/guarantees.md).

    pip install tensorflow torch
    python benchmarks/exactness.py [--peers unisono tensorflow data-parallel torch-ddp] [--programs pairs ...]

Each peer trains the same small program on one and on two devices (torch: processes over Gloo), with the
same data, first weights and order of rows. A number is the largest difference of an array after training, as
a share of how much training has changed that array on one device; `equal` is at most 0.01 %. Weights and the
layers' own states count apart. Nothing here is timed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

PEERS = {
    "unisono": "Unisono",
    "tensorflow": "TF MirroredStrategy",
    "data-parallel": "DataParallel",
    "torch-ddp": "torch DDP",
}
PROGRAMS = {
    "pairs": "a loss over all pairs of a batch",
    "largest": "a layer that keeps the largest value of each feature",
    "count": "a layer that counts rows",
    "queue": "a layer with a queue of the last 16 rows",
    "book": "a layer with a code book, moved to the mean of its rows",
    "last": "BatchNormalization, and a last batch of two rows",
    "centered": "a layer that computes `t - mean(t, 0)`",
    "clip": "a `train_step` that clips gradients by their norm",
    "sharpness": "a `train_step` at weights moved along the gradient",
}
FEATURES, ROWS, STEPS, CODES, QUEUE = 6, 8, 3, 4, 16
#: The shapes of the layers' states, by their programs.
SHAPES = {"largest": (FEATURES,), "count": (), "queue": (QUEUE, FEATURES), "book": (CODES, FEATURES)}
RATE, LIMIT, RADIUS = 0.1, 0.05, 0.5
#: Greatest share of a change that counts as rounding.
EQUAL = 1e-4


def batches(program):
    """Return the batches of a program, each of rows and targets.

    Where only the last batch matters, both halves of the others are equal: statistics of a replica's rows are
    those of all.
    """
    random = np.random.default_rng(0)
    found = []
    for _ in range(STEPS):
        x = random.normal(size=(ROWS, FEATURES)).astype("float32")
        if program == "last":
            x[ROWS // 2 :] = x[: ROWS // 2]
        found.append(x)
    if program == "last":
        found.append(random.normal(size=(2, FEATURES)).astype("float32"))
    return [(x, x[:, :4] * 2 + 1) for x in found]


# --- Keras: the program is the same for three peers ------------------------------------------------


def keras_layer(program):
    """Return the program's own layer, or None."""
    import keras
    from keras import ops

    class Stateful(keras.layers.Layer):
        def build(self, shape):
            first = np.random.default_rng(1).normal(size=SHAPES[program]).astype("float32")
            first = first if program == "book" else np.zeros_like(first)
            # A function: Keras' own initializers draw by the backend's generator.
            self.state = self.add_weight(
                shape=first.shape, initializer=lambda *_, **__: ops.convert_to_tensor(first), trainable=False
            )

        def call(self, x, training=False):
            if training:
                before = ops.convert_to_tensor(self.state)
                self.state.assign(new_state(ops, program, before, ops.stop_gradient(x)))
            return x + ops.tanh(ops.mean(self.state))

    class Centered(keras.layers.Layer):
        def call(self, x):
            return x - ops.mean(x, axis=0)

    if program in SHAPES:
        return Stateful()
    return {"centered": Centered, "last": keras.layers.BatchNormalization}.get(program, lambda: None)()


def new_state(ops, program, state, x):
    """Return a layer's state after it has seen rows; `ops` are those of Keras."""
    rows = ops.shape(x)[0]
    if program == "largest":
        return ops.maximum(state, ops.max(x, axis=0))
    if program == "count":
        return state + ops.cast(rows, "float32")
    if program == "queue":
        return ops.concatenate([x, state[: QUEUE - rows]])
    distances = ops.sum(ops.square(x[:, None] - state[None]), axis=-1)
    nearest = ops.one_hot(ops.argmin(distances, axis=-1), CODES)
    counts = ops.sum(nearest, axis=0)[:, None]
    means = ops.matmul(ops.transpose(nearest), x) / ops.maximum(counts, 1.0)
    return ops.where(counts > 0, 0.5 * state + 0.5 * means, state)


def own_step_of_jax(program):
    """Return a model class whose step is written for JAX, by the program's rule."""
    import jax
    import jax.numpy as jnp
    import keras

    class OwnStep(keras.Model):
        def train_step(self, state, data):
            trainable, non_trainable, optimizer, metrics = state
            x, y = data

            def loss_of(weights):
                y_pred, rest = self.stateless_call(weights, non_trainable, x, training=True)
                return self.compute_loss(x=x, y=y, y_pred=y_pred), rest

            gradient = jax.value_and_grad(loss_of, has_aux=True)
            (loss, rest), found = gradient(trainable)
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in found))
            if program == "clip":
                found = [g * jnp.minimum(1, LIMIT / norm) for g in found]
            else:
                moved = [w + RADIUS * g / norm for w, g in zip(trainable, found, strict=True)]
                _, found = gradient(moved)
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, found, trainable)
            return {"loss": loss}, (trainable, rest, optimizer, metrics)

    return OwnStep


def own_step_of_tensorflow(program):
    """Return a model class whose step is written for TensorFlow, by the program's rule."""
    import keras
    import tensorflow as tf

    class OwnStep(keras.Model):
        def train_step(self, data):
            x, y = data
            loss, found = self.gradient(x, y)
            norm = tf.linalg.global_norm(found)
            weights = self.trainable_variables
            if program == "clip":
                found, _ = tf.clip_by_global_norm(found, LIMIT, norm)
            else:
                steps = [RADIUS * g / norm for g in found]
                for weight, step in zip(weights, steps, strict=True):
                    weight.assign(weight + step)
                _, found = self.gradient(x, y)
                for weight, step in zip(weights, steps, strict=True):
                    weight.assign(weight - step)
            self.optimizer.apply_gradients(zip(found, weights, strict=True))
            return {"loss": loss}

        def gradient(self, x, y):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            return loss, tape.gradient(loss, self.trainable_variables)

    return OwnStep


def contrastive(y_true, y_pred):
    """Return a value for each row, which depends on all rows of a batch."""
    import keras
    from keras import ops

    similarities = ops.matmul(y_pred, ops.transpose(y_pred))
    labels = ops.arange(ops.shape(y_pred)[0])
    return keras.losses.sparse_categorical_crossentropy(labels, similarities, from_logits=True)


def keras_arrays(program, scope, own_step):
    """Train with Keras; return arrays before and after, weights and states."""
    import keras

    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    with scope():
        inputs = keras.Input((FEATURES,))
        layer = keras_layer(program)
        x = inputs if layer is None else layer(inputs)
        kind = own_step(program) if program in ("clip", "sharpness") else keras.Model
        model = kind(inputs, keras.layers.Dense(4)(keras.layers.Dense(8, activation="tanh")(x)))
        model.compile(keras.optimizers.SGD(RATE), contrastive if program == "pairs" else "mse")
    first = [v.numpy() for v in (*model.trainable_variables, *model.non_trainable_variables)]
    x, y = (np.concatenate(part) for part in zip(*batches(program), strict=True))
    model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    last = [v.numpy() for v in (*model.trainable_variables, *model.non_trainable_variables)]
    return first, last, len(model.trainable_variables)


def keras_peer(peer, devices):
    """Return what trains a program under a peer of Keras."""
    import contextlib

    os.environ["KERAS_BACKEND"] = "tensorflow" if peer == "tensorflow" else "jax"
    scope, own_step = contextlib.nullcontext, own_step_of_jax
    if peer == "tensorflow":
        from peers.keras_fit import tf_strategy

        own_step = own_step_of_tensorflow
        if devices > 1:
            scope = tf_strategy(devices).scope
    elif peer == "unisono":
        import unisono

        if devices > 1:
            scope = unisono.MirroredStrategy([f"cpu:{i}" for i in range(devices)]).scope
    else:
        import jax

        jax.config.update("jax_num_cpu_devices", devices)
        import keras

        if devices > 1:
            keras.distribution.set_distribution(keras.distribution.DataParallel())
    return lambda program: keras_arrays(program, scope, own_step)


# --- torch ------------------------------------------------------------------------------------------


def torch_layer(program):
    """Return the program's own layer, or one that does nothing."""
    import torch

    class Stateful(torch.nn.Module):
        def __init__(self):
            super().__init__()
            first = np.random.default_rng(1).normal(size=SHAPES[program]).astype("float32")
            self.register_buffer("state", torch.tensor(first if program == "book" else first * 0))

        def forward(self, x):
            with torch.no_grad():
                self.state.copy_(self.new(x.detach()))
            return x + torch.tanh(self.state.mean())

        def new(self, x):
            if program == "largest":
                return torch.maximum(self.state, x.max(0).values)
            if program == "count":
                return self.state + len(x)
            if program == "queue":
                return torch.cat([x, self.state[: QUEUE - len(x)]])
            nearest = torch.cdist(x, self.state).argmin(-1)
            nearest = torch.nn.functional.one_hot(nearest, CODES).float()
            counts = nearest.sum(0)[:, None]
            means = nearest.T @ x / counts.clamp(min=1)
            return torch.where(counts > 0, 0.5 * self.state + 0.5 * means, self.state)

    class Centered(torch.nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    if program in SHAPES:
        return Stateful()
    if program == "last":
        return torch.nn.BatchNorm1d(FEATURES, eps=1e-3, momentum=0.01)
    return Centered() if program == "centered" else torch.nn.Identity()


def torch_arrays(program, rank, devices):
    """Train with torch; return arrays before and after, weights and buffers."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    bare = nn.Sequential(torch_layer(program), nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 4))

    def arrays():
        return [x.detach().numpy().copy() for x in (*bare.parameters(), *bare.buffers())]

    first = arrays()
    model = nn.parallel.DistributedDataParallel(bare) if devices > 1 else bare
    optimizer = torch.optim.SGD(model.parameters(), RATE)

    def backward(x, y):
        optimizer.zero_grad()
        z = model(x)
        if program == "pairs":
            loss = nn.functional.cross_entropy(z @ z.T, torch.arange(len(z)))
        else:
            loss = nn.functional.mse_loss(z, y)
        loss.backward()

    for batch in batches(program):
        own = len(batch[0]) // devices
        x, y = (torch.tensor(part[rank * own : (rank + 1) * own]) for part in batch)
        backward(x, y)
        if program == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        if program == "sharpness":
            with torch.no_grad():
                norm = sum((p.grad**2).sum() for p in model.parameters()).sqrt()
                steps = [RADIUS * p.grad / norm for p in model.parameters()]
                for weight, step in zip(model.parameters(), steps, strict=True):
                    weight.add_(step)
            backward(x, y)
            with torch.no_grad():
                for weight, step in zip(model.parameters(), steps, strict=True):
                    weight.sub_(step)
        optimizer.step()
    return first, arrays(), len(list(bare.parameters()))


def torch_peer(rank, devices, address):
    """Return what trains a program as one of torch's processes."""
    if devices > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=devices)
    return lambda program: torch_arrays(program, rank, devices)


# --- the table --------------------------------------------------------------------------------------


def task(peer, program, devices, rank, folder):
    """Train one program, and write its arrays, or why there are none."""
    address = f"file://{folder}/meeting"
    train = torch_peer(rank, devices, address) if peer == "torch-ddp" else keras_peer(peer, devices)
    try:
        first, last, weights = train(program)
    except Exception as error:
        reason = str(error).strip().splitlines() or [""]
        Path(folder, f"{rank}.txt").write_text(f"{type(error).__name__}: {reason[0][:120]}")
        os._exit(1)  # the other process waits for this one, and JAX's and torch's threads for it
    np.savez(Path(folder, f"{rank}.npz"), weights, *first, *last)


def trained(peer, program, devices):
    """Return `(first, last, number of weights)` of a peer in processes of their own, or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = range(devices if peer == "torch-ddp" else 1)
        environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
        command = [sys.executable, __file__, "--task", peer, program, str(devices)]
        running = [
            subprocess.Popen([*command, str(rank), folder], env=environment, stderr=subprocess.DEVNULL)
            for rank in ranks
        ]
        codes = []
        for process in running:
            try:
                codes.append(process.wait(300 if not any(codes) else 10))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(process.wait())
        if any(codes):
            texts = [path.read_text() for path in sorted(Path(folder).glob("*.txt"))]
            return texts[0] if texts else f"ended with {codes}"
        with np.load(Path(folder, "0.npz")) as found:
            weights, *arrays = (found[name] for name in found.files)
            return arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :], int(weights)


def difference(one, two):
    """Return in words how far two devices are from one."""
    if isinstance(one, str) or isinstance(two, str):
        return f"one device: {one}" if isinstance(one, str) else two
    (first, last, weights), (_, other, _) = one, two
    shares = [
        np.max(np.abs(b - a)) / np.max(np.abs(a - start))
        for start, a, b in zip(first, last, other, strict=True)
        if np.any(a != start)
    ]
    count = sum(np.any(a != start) for start, a in zip(first[:weights], last[:weights], strict=True))
    parts = {"weights": shares[:count], "state": shares[count:]}
    if max(shares) <= EQUAL:
        return "equal"
    return ", ".join(f"{name} {_percent(max(part))}" for name, part in parts.items() if part)


def _percent(share):
    return f"{share:.0%}" if share >= 0.01 else f"{100 * share:.1g}%"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--task", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        peer, program, devices, rank, folder = options.task
        return task(peer, program, int(devices), int(rank), folder)
    print("| | " + " | ".join(PEERS[peer] for peer in options.peers) + " |")
    print("|---" * (1 + len(options.peers)) + "|")
    for program in options.programs:
        cells = [difference(*(trained(peer, program, n) for n in (1, 2))) for peer in options.peers]
        print(f"| {PROGRAMS[program]} | " + " | ".join(cells) + " |", flush=True)
    return None


if __name__ == "__main__":
    main()
