"""What a plan computes on one device and on a strategy, and how the two compare."""

import contextlib
import dataclasses
import logging
from collections import Counter
from unittest import mock

import keras
import numpy as np

from tests.random_models import plans
from unisono.training.groups._batch_policy import BatchPolicy

#: Largest difference between a strategy and one device, relative to a value, or absolute for values below 1.
#: Sums over rows are added in another order.
TOLERANCE = 2e-5


class _FirstStep(keras.callbacks.Callback):
    """Notes when the first step has ended."""

    def __init__(self, events):
        super().__init__()
        self._events = events

    def on_train_batch_end(self, batch, logs=None):
        self._events.append("step")

    on_test_batch_end = on_predict_batch_end = on_train_batch_end


@dataclasses.dataclass
class Result:
    """What a run gave.

    Args:
        numbers: arrays by name.
        events: texts that were logged, and "step" for each step that ended.
        modes: how often each mode occurred.
    """

    numbers: dict
    events: list
    modes: Counter

    @property
    def said(self):
        """What is said to differ, before the first step; "" for nothing."""
        first = self.events.index("step") if "step" in self.events else len(self.events)
        return next((e for e in self.events[:first] if "differs from one device" in e), "")

    @property
    def together(self):
        """Why rows are computed together; "" where they are not."""
        return next((e for e in self.events if "cannot be computed apart" in e), "")


@contextlib.contextmanager
def _noted(events, modes):
    """Note log lines and modes of batches in a block."""

    class Handler(logging.Handler):
        def emit(self, record):
            events.append(record.getMessage())

    original = BatchPolicy.mode

    def mode(self, batch, rows):
        found = original(self, batch, rows)
        modes[found.name] += 1
        return found

    log, handler = logging.getLogger("unisono"), Handler()
    level = log.level
    log.addHandler(handler)
    # What is said of batches of other sizes than the usual one.
    log.setLevel(logging.INFO)
    try:
        with mock.patch.object(BatchPolicy, "mode", mode):
            yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def run(plan, strategy=None):
    """Train, and evaluate and predict, as a plan says; on one device without a strategy."""
    # Names of layers are counted.
    keras.utils.clear_session(free_memory=False)
    result = Result({}, [], Counter())
    callbacks = [_FirstStep(result.events)]
    with _noted(result.events, result.modes):
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            model = plans.build(plan)
        x, y, weights = plans.data(plan)
        options = {"batch_size": plan.batch_size, "verbose": 0, "callbacks": callbacks}
        history = model.fit(x, y, epochs=plan.epochs, shuffle=False, **weights, **options)
        numbers = {f"history {name}": values for name, values in history.history.items()}
        if "evaluate" in plan.calls:
            found = model.evaluate(x, y, return_dict=True, **options)
            numbers |= {f"evaluate {name}": value for name, value in found.items()}
        if "predict" in plan.calls:
            found = model.predict(x, **options)
            numbers |= {
                f"predict {i}": v for i, v in enumerate(found if isinstance(found, list) else [found])
            }
    for i, variable in enumerate([*model.variables, *model.optimizer.variables]):
        numbers[f"{i} {variable.path}"] = np.asarray(variable.value)
    result.numbers = {name: np.asarray(value) for name, value in numbers.items()}
    return result


def differences(one, other):
    """By name, how far numbers of one device and of a strategy lie apart, where that is too far."""
    assert list(one) == list(other), (list(one), list(other))
    found = {}
    for name, a in one.items():
        b = other[name]
        if a.shape != b.shape:
            found[name] = f"shape {b.shape} for {a.shape}"
            continue
        mine, theirs = a.astype("f8"), b.astype("f8")
        with np.errstate(invalid="ignore"):
            off = np.abs(mine - theirs) / np.maximum(1.0, np.abs(mine))
        off = np.where(
            (mine == theirs) | (np.isnan(mine) & np.isnan(theirs)), 0.0, np.nan_to_num(off, nan=np.inf)
        )
        if off.size and off.max() > TOLERANCE:
            found[name] = f"{off.max():.1e}"
    return found


@dataclasses.dataclass
class Verdict:
    """How a plan's run on a strategy compares with one device.

    Args:
        kind: "equal", "said" (something is said to differ), "silent", "error" (of the strategy), or "invalid"
            (one device cannot run it).
        text: what differs, or the error.
        result: the strategy's.
    """

    plan: plans.Plan
    kind: str
    text: str = ""
    result: Result | None = None

    @property
    def is_well(self):
        """Whether the numbers are those of one device, or are said to differ."""
        return self.kind not in ("silent", "error")

    def __str__(self):
        lines = [f"{self.kind}: {self.plan}", f"    {self.text}" if self.text else ""]
        if self.result is not None:
            lines += [f"    modes {dict(self.result.modes)}"]
            lines += [f"    {e}" for e in self.result.events if e != "step"]
        return "\n".join(filter(None, lines))


def strategy_of(plan):
    """The strategy of a plan on virtual devices."""
    import unisono

    return unisono.MirroredStrategy([f"cpu:{i}" for i in range(plan.replicas)], state_layout=plan.layout)


def grid_of(plan):
    """The same with replicas of two devices, which share an axis of each variable that divides."""
    import unisono

    def cut(variable):
        even = [i for i, n in enumerate(variable.shape) if n and n % 2 == 0]
        chosen = even[-1 if plan.rows % 2 else 0] if even else None
        return tuple("model" if i == chosen else None for i in range(len(variable.shape)))

    names = [f"cpu:{i}" for i in range(2 * min(plan.replicas, 4))]
    return unisono.MirroredStrategy(names, devices_per_replica=2, layout_map=cut, state_layout=plan.layout)


def check(plan, make=strategy_of):
    """Compare a plan's run on a strategy with one device."""
    try:
        # Keras alone has no steps in TensorFlow's form on JAX.
        one = run(plan, make(dataclasses.replace(plan, replicas=1)) if plan.step == "tape" else None)
    except Exception as error:  # whatever Keras says of a model that was drawn
        return Verdict(plan, "invalid", f"{type(error).__name__}: {str(error)[:300]}")
    try:
        result = run(plan, make(plan))
    except Exception as error:  # is the verdict
        return Verdict(plan, "error", f"{type(error).__name__}: {error}")
    off = differences(one.numbers, result.numbers)
    text = ", ".join(f"{name}: {size}" for name, size in list(off.items())[:6])
    if not off:
        return Verdict(plan, "equal", "", result)
    return Verdict(plan, "said" if result.said else "silent", text, result)


def check_all(seeds, make=strategy_of):
    """Check plans, print what is not equal, and counts; return whether all is well."""
    kinds, modes = Counter(), Counter()
    for seed in seeds:
        verdict = check(plans.draw(seed), make)
        kinds[verdict.kind] += 1
        print(verdict if verdict.kind != "equal" else f"equal: {verdict.plan}", flush=True)
        if verdict.kind == "equal" and verdict.result.said:
            print(f"    said in vain: {verdict.result.said}")
        if verdict.plan.is_apart and verdict.result is not None:
            modes.update(verdict.result.modes)
            if verdict.result.together:
                print(f"    rows are apart: {verdict.result.together}", flush=True)
    print(dict(kinds), "modes of batches of plans whose rows are apart:", dict(modes))
    return not kinds["silent"] + kinds["error"]
