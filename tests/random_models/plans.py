"""Plans of models and calls, as data: drawn from a seed alone, and built anew for each run."""

import dataclasses
import random

import keras
import numpy as np

from tests.random_models import layers, losses, states
from tests.random_models.layers import CLASSES, VOCABULARY, WIDTH, Function, NoMask, OfSizes

L, ops = keras.layers, keras.ops

#: Shapes of inputs without rows.
SHAPES = {"vector": (WIDTH,), "series": (4, WIDTH), "image": (5, 5, 2), "tokens": (5,)}


@dataclasses.dataclass(frozen=True)
class Plan:
    """A model and a call of it.

    Args:
        seed: from which it was drawn; of weights and data, too.
        inputs: kinds of inputs, which meet in a vector.
        first: layers of the first input, of its kind.
        parts: layers of the vector, as `(group, name)`.
        heads: of the outputs, as `(kind, loss, metric)`; a metric may be "".
        step: "" for Keras' own, the name of a step of `losses.STEPS`, or "tape".
        extra: what else a model overrides: "test_step", "compute_loss", "compute_metrics",
            "compute_loss_and_updates", "train_step of the object", "compute_loss of the object", or "".
        subclassed: whether the model is a subclass with a `call`.
        optimizer: its name.
        rows: of the data.
        weights: "sample", "class", or "".
        calls: those after `fit`.
        replicas: how many.
        layout: of the strategy's state.
        together: `steps_per_execution`.
    """

    seed: int
    inputs: tuple
    first: tuple
    parts: tuple
    heads: tuple
    step: str
    extra: str
    subclassed: bool
    optimizer: str
    batch_size: int
    rows: int
    epochs: int
    weights: str
    calls: tuple
    replicas: int
    layout: str
    together: int

    def __str__(self):
        parts = " + ".join(f"{group}:{name}" for group, name in (*self.first, *self.parts))
        heads = ", ".join("/".join(filter(None, head)) for head in self.heads)
        words = [f"seed {self.seed}: {'+'.join(self.inputs)} -> {parts or 'nothing'} -> {heads}"]
        words += [f"step {self.step}"] * bool(self.step) + [self.extra] * bool(self.extra)
        words += ["subclassed"] * self.subclassed + [f"{self.weights} weights"] * bool(self.weights)
        words += [f"{self.optimizer}, {self.rows} rows in batches of {self.batch_size}, {self.epochs} epochs"]
        words += [f"{self.together} steps together"] * (self.together > 1) + ["fit " + " ".join(self.calls)]
        return "; ".join([*words, f"{self.replicas} replicas, {self.layout}"])

    @property
    def is_apart(self):
        """Whether by construction each row's results depend on this row alone."""
        groups = {group for group, _ in (*self.first, *self.parts)}
        mixes = groups & {"mixing", "of sizes", "state", "added", "drawing", "normalizing"}
        kinds = {kind for kind, _, _ in self.heads}
        linear = {"", "plain", "centralized", "scaled", "with a mean"}
        return not mixes and not self.extra and not kinds & {"pairs", "folded"} and self.step in linear


#: Methods that are set on the model, and not in its class.
OF_THE_OBJECT = ("train_step of the object", "compute_loss of the object")
#: What else a model may override.
EXTRAS = ("test_step", "compute_loss", "compute_metrics", "compute_loss_and_updates", *OF_THE_OBJECT)


def draw(seed, **given):
    """The plan of a seed; `given` replaces what was drawn."""
    rng = random.Random(seed)
    inputs = tuple(rng.choices(list(SHAPES), [6, 2, 2, 2], k=1 if rng.random() < 0.8 else 2))
    heads = tuple(_head(rng) for _ in range(1 if rng.random() < 0.85 else 2))
    batch_size = rng.choice(
        [1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 10, 12, 12, 13, 16, 16, 18, 20, 24, 24, 32, 33, 40]
    )
    whole, rest = rng.randint(1, 2), rng.choice([0, 0, rng.randint(0, batch_size - 1)])
    kind = rng.random()
    replicas = rng.choice([1, 2, 2, 2, 2, 2, 3, 4, 4, 8])
    plan = Plan(
        seed=seed,
        inputs=inputs,
        first=tuple(_first(rng, inputs[0])),
        parts=tuple(_part(rng) for _ in range(rng.choice([1, 2, 2, 3]))),
        heads=heads,
        step="" if kind < 0.75 else ("tape" if kind > 0.97 else rng.choice(list(losses.STEPS))),
        extra=rng.choices(["", *EXTRAS], [16, *[1] * len(EXTRAS)])[0],
        subclassed=rng.random() < 0.2,
        optimizer=rng.choice(["sgd", "adam", "clipnorm", "global"]),
        batch_size=batch_size,
        rows=whole * batch_size + rest,
        epochs=rng.choice([1, 1, 2]),
        weights=rng.choices(["", "sample", "class"], [6, 2, 1])[0],
        calls=tuple(c for c in ("evaluate", "predict") if rng.random() < 0.4),
        replicas=replicas,
        layout="mirrored" if replicas == 1 else rng.choice(["mirrored"] * 3 + ["sharded", "fully_sharded"]),
        together=rng.choice([1, 1, 1, 2, 3]),
    )
    if plan.weights == "class" and (len(heads) > 1 or heads[0][0] not in ("classes", "truths")):
        plan = dataclasses.replace(plan, weights="")
    return dataclasses.replace(plan, **given)


def _head(rng):
    kind = rng.choices(list(losses.LOSSES), [9, 4, 4, 3, 1, 1])[0]
    metric = rng.choice(["", *losses.METRICS[kind]])
    return kind, rng.choice(list(losses.LOSSES[kind])), metric


def _first(rng, kind):
    if kind == "vector":
        return
    if kind == "tokens":
        yield "embedding", rng.choice(["plain", "masked"])
    table, group = (layers.IMAGE, "image") if kind == "image" else (layers.SERIES, "series")
    for _ in range(rng.choice([0, 1, 1])):
        yield group, rng.choice(list(table))
    yield ("from image", "flat") if kind == "image" else ("from series", rng.choice(list(layers.FROM_SERIES)))


#: Groups of layers of vectors: how often each is drawn.
GROUPS = {
    "vector": (6, layers.VECTOR),
    "apart": (8, layers.APART),
    "mixing": (3, layers.MIXING),
    "of sizes": (1, layers.OF_SIZES),
    "state": (5, states.STATES),
    "added": (1, states.ADDED),
    "drawing": (1, layers.DRAWING),
    "normalizing": (1, layers.NORMALIZING),
}


def _part(rng):
    group = rng.choices(list(GROUPS), [often for often, _ in GROUPS.values()])[0]
    return group, rng.choice(list(GROUPS[group][1]))


# --- from a plan to a model --------------------------------------------------------------------------------


def _layer(group, name):
    match group:
        case "vector" | "normalizing" | "drawing":
            return {**layers.VECTOR, **layers.NORMALIZING, **layers.DRAWING}[name]()
        case "state":
            return states.STATES[name]()
        case "apart":
            return Function(layers.APART[name])
        case "mixing":
            return Function(layers.MIXING[name])
        case "of sizes":
            return OfSizes(layers.OF_SIZES[name])
        case "added":
            return states.Loss(states.ADDED[name])
        case "series" | "from series":
            return {**layers.SERIES, **layers.FROM_SERIES}[name]()
        case "image":
            return layers.IMAGE[name]()
        case "embedding":
            return L.Embedding(VOCABULARY, WIDTH, mask_zero=name == "masked")
    return L.Flatten()


def _branch(kind, first, inputs):
    x = inputs
    for part in first:
        x = _layer(*part)(x)
    if kind == "tokens" and not first:
        x = L.GlobalAveragePooling1D()(L.Embedding(VOCABULARY, WIDTH)(x))
    if len(x.shape) > 2:
        x = L.Flatten()(NoMask()(x))
    return NoMask()(x) if x.shape[-1] == WIDTH else L.Dense(WIDTH)(NoMask()(x))


def similarities(x):
    return x @ ops.transpose(x)


def _output(kind, loss, x):
    if kind == "numbers":
        return L.Dense(3)(x)
    if kind == "classes":
        return L.Dense(3)(x) if loss.startswith("contrastive") else L.Dense(CLASSES, activation="softmax")(x)
    if kind == "hot":
        return L.Dense(CLASSES, activation="softmax")(x)
    if kind == "truths":
        return L.Dense(1, activation="sigmoid")(x)
    if kind == "folded":
        return L.Lambda(lambda x: ops.reshape(x, (-1, 1)), output_shape=(1,))(L.Dense(3)(x))
    return L.Lambda(similarities, output_shape=(None,))(L.Dense(3)(x))


def build(plan):
    """The model of a plan, with the weights of its seed, compiled."""
    keras.utils.set_random_seed(plan.seed)
    inputs = [
        keras.Input(SHAPES[kind], dtype="int32" if kind == "tokens" else "float32") for kind in plan.inputs
    ]
    branches = [
        _branch(kind, plan.first if i == 0 else (), x)
        for i, (kind, x) in enumerate(zip(plan.inputs, inputs, strict=True))
    ]
    x = branches[0] if len(branches) == 1 else L.Average()(branches)
    for group, name in plan.parts:
        x = _layer(group, name)(x)
    outputs = [_output(kind, loss, x) for kind, loss, _ in plan.heads]
    given = inputs if len(inputs) > 1 else inputs[0], outputs if len(outputs) > 1 else outputs[0]
    model = _model_of(plan, *given)
    if plan.extra in OF_THE_OBJECT:
        losses.set_on_the_object(model, plan.extra.partition(" ")[0])
    compile_as_planned(plan, model)
    return model


def _model_of(plan, inputs, outputs):
    parts = []
    if plan.step:
        parts.append(losses.Tape if plan.step == "tape" else losses.Own)
    if plan.extra and plan.extra not in OF_THE_OBJECT:
        parts.append(
            {
                "test_step": losses.OwnTest,
                "compute_loss": losses.OwnLoss,
                "compute_metrics": losses.OwnMetrics,
                "compute_loss_and_updates": losses.OwnUpdates,
            }[plan.extra]
        )
    facts = {"own_step": plan.step, "own_test": ["mean", "largest", "loss"][plan.seed % 3]}
    facts["own_loss"] = ["mean", "root"][plan.seed % 2]
    if not plan.subclassed:
        # Keras makes a functional model of a class whose first base it is.
        cls = type("Drawn", (*parts, keras.Model), facts)
        return cls(inputs, outputs)
    net = keras.Model(inputs, outputs)
    cls = type(
        "Drawn",
        (*parts, keras.Model),
        facts | {"call": lambda self, x, training=False: self.net(x, training=training)},
    )
    model = cls()
    model.net = net
    model(net.inputs if len(net.inputs) > 1 else net.inputs[0])
    return model


def compile_as_planned(plan, model):
    """Compile a model."""
    optimizer = {
        "sgd": lambda: keras.optimizers.SGD(0.02, momentum=0.9),
        # Where a gradient is zero but for rounding, Adam would make a step of it.
        "adam": lambda: keras.optimizers.Adam(0.01, epsilon=0.05),
        "clipnorm": lambda: keras.optimizers.SGD(0.02, clipnorm=0.1),
        "global": lambda: keras.optimizers.SGD(0.02, global_clipnorm=0.1),
    }[plan.optimizer]()
    found = [losses.LOSSES[kind][loss]() for kind, loss, _ in plan.heads]
    metrics = [[losses.METRICS[kind][metric]()] if metric else [] for kind, _, metric in plan.heads]
    several = len(found) > 1
    model.compile(
        optimizer,
        loss=found if several else found[0],
        metrics=metrics if several else metrics[0],
        steps_per_execution=plan.together,
    )


def data(plan):
    """Inputs, targets, and the weights of rows for `fit`."""
    rng = np.random.default_rng(plan.seed)
    inputs = [
        rng.integers(0, VOCABULARY, (plan.rows, 5)).astype("int32")
        if kind == "tokens"
        else rng.normal(size=(plan.rows, *SHAPES[kind])).astype("float32")
        for kind in plan.inputs
    ]
    targets = [_targets(kind, plan.rows, rng) for kind, _, _ in plan.heads]
    weights = {}
    if plan.weights == "sample":
        each = [rng.uniform(0, 2, plan.rows).astype("float32") for _ in targets]
        weights["sample_weight"] = each if len(each) > 1 else each[0]
    elif plan.weights == "class":
        weights["class_weight"] = {i: 0.5 + 0.5 * i for i in range(CLASSES)}
    return inputs if len(inputs) > 1 else inputs[0], targets if len(targets) > 1 else targets[0], weights


def _targets(kind, rows, rng):
    match kind:
        case "numbers" | "folded":
            return rng.normal(size=(rows, 3)).astype("float32")
        case "classes":
            return rng.integers(0, CLASSES, rows).astype("int32")
        case "hot":
            return np.eye(CLASSES, dtype="float32")[rng.integers(0, CLASSES, rows)]
        case "truths":
            return rng.integers(0, 2, (rows, 1)).astype("float32")
    return rng.normal(size=(rows, 1)).astype("float32")
