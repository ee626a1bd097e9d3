"""The Python values that a step reads by name, found in its bytecode."""

import functools
import sys
import types

import numpy as np
import pytest

from unisono.step.programs._python_reads import MISSING, Watch

WEIGHT = 1.0
LIST = [1, 2]
TABLE = {"weight": 1.0, "inner": {"weight": 1.0}}
ARRAY = np.ones(3)
OPTIONS = types.SimpleNamespace(weight=1.0, inner=types.SimpleNamespace(weight=1.0))
COUNT = 0


class Options:
    weight = 1.0


class Slots:
    __slots__ = ("weight",)


SLOTS = Slots()
SLOTS.weight = 1.0


def helper(x):
    return x * WEIGHT


class Layer:
    """Called by a step; of this module."""

    weight = 1.0

    @property
    def doubled(self):
        return self.weight * 2

    def __call__(self, x):
        return x * self.weight

    def step(self, x):
        return self.scaled(x)

    def scaled(self, x):
        return x * self.weight

    def step_of_property(self, x):
        return x * self.doubled


LAYER = Layer()


def closing_over(thing):
    def step(x):
        return [thing.weight * y for y in x], (lambda: thing.weight)()

    return step


def with_a_variable(x):
    options = OPTIONS
    inner = options.inner
    return x * inner.weight


THINGS = [LAYER]

CASES = {
    "global": (lambda x: x * WEIGHT, "WEIGHT", 2.0),
    "beside constants": (lambda x: (x.sum(()), x[1:2], x[()], x * WEIGHT), "WEIGHT", 2.0),
    "in a function that it calls": (lambda x: helper(x), "WEIGHT", 2.0),
    "in a lambda within": (lambda x: (lambda: x * WEIGHT)(), "WEIGHT", 2.0),
    "an item": (lambda x: x * TABLE["weight"], "TABLE", {"weight": 2.0}),
    "an item of an item": (lambda x: x * TABLE["inner"]["weight"], "TABLE.inner", {"weight": 2.0}),
    "an item of a collection in whole": (lambda x: [x * y for y in LIST], "LIST", [1, 3]),
    "a small array": (lambda x: x * ARRAY, "ARRAY", np.zeros(3)),
    "an attribute": (lambda x: x * OPTIONS.weight, "OPTIONS.weight", 2.0),
    "an attribute of an attribute": (lambda x: x * OPTIONS.inner.weight, "OPTIONS.inner.weight", 2.0),
    "an attribute of a class": (lambda x: x * Options.weight, "Options.weight", 2.0),
    "an attribute in a slot": (lambda x: x * SLOTS.weight, "SLOTS.weight", 2.0),
    "an attribute of a layer": (lambda x: LAYER(x), "LAYER.weight", 2.0),
    "a function": (lambda x: helper(x), "helper", abs),
    "a method": (LAYER.step, "LAYER.weight", 2.0),
    "a part of a method": (functools.partial(LAYER.step, 1), "LAYER.weight", 2.0),
    "a part of a function": (functools.partial(Layer.scaled, LAYER), "LAYER.weight", 2.0),
    "an attribute with a default": (lambda x: x * getattr(OPTIONS, "weight", 1.0), "OPTIONS.weight", 2.0),
    "an attribute of a variable": (with_a_variable, "OPTIONS.inner.weight", 2.0),
    "the object of a method": (
        lambda x: TABLE["inner"].get("weight"),
        "TABLE.inner",
        {"weight": 1.0, "new": 1},
    ),
    "objects in a list": (lambda x: [thing(x) for thing in THINGS], "THINGS", [LAYER, LAYER]),
    "an object that is called": (LAYER, "LAYER.weight", 2.0),
    "a property": (LAYER.step_of_property, "LAYER.weight", 2.0),
    "an attribute of what it closes over": (closing_over(LAYER), "LAYER.weight", 2.0),
}


def assign(monkeypatch, place, value):
    owner, _, name = place.rpartition(".")
    if owner == "TABLE":
        monkeypatch.setitem(TABLE, name, value)
        return
    found = globals()
    for part in owner.split(".") if owner else ():
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    (monkeypatch.setitem if isinstance(found, dict) else monkeypatch.setattr)(found, name, value)


@pytest.mark.parametrize("name", CASES)
def test_what_is_read_decides(monkeypatch, name):
    step, place, value = CASES[name]
    watch = Watch(step)
    watch.traced([])
    assert watch.holds()
    with monkeypatch.context() as changes:
        assign(changes, place, value)
        assert not watch.holds()
        assert Watch(step).holds()
    assert watch.holds()


def test_what_changes_in_place_decides():
    watch = Watch(lambda x: x * ARRAY + len(LIST) + LIST[0] + TABLE["weight"])
    for collection, at, value in ((ARRAY, 0, 5), (LIST, 0, 7), (TABLE, "weight", 9.0)):
        before = collection[at]
        collection[at] = value
        assert not watch.holds()
        collection[at] = before
        assert watch.holds()
    LIST.append(3)
    assert not watch.holds()
    LIST.pop()
    assert watch.holds()


def test_other_objects_of_equal_value_are_the_same(monkeypatch):
    watch = Watch(lambda x: x * WEIGHT + ARRAY[LIST[0]])
    monkeypatch.setitem(globals(), "WEIGHT", float("1.0"))
    monkeypatch.setitem(globals(), "ARRAY", ARRAY.copy())
    monkeypatch.setitem(globals(), "LIST", list(LIST))
    assert watch.holds()
    monkeypatch.setitem(globals(), "WEIGHT", 1)  # another type
    assert not watch.holds()


def test_attributes_of_arguments_decide():
    options = types.SimpleNamespace(weight=1.0, epoch=0)

    def step(x, options, *, more=None):
        return x * options.weight if more is None else x * more.weight

    for args, keywords in (((MISSING, options), {}), ((MISSING,), {"more": options})):
        watch = Watch(step, args, keywords)
        options.epoch += 1
        assert watch.holds()
        options.weight += 1
        assert not watch.holds()


def test_what_is_not_read_does_not(monkeypatch):
    other = types.SimpleNamespace(weight=1.0, epoch=0)
    table = {"weight": 1.0, "epoch": 0}
    watch = Watch(lambda x: x * other.weight * table["weight"])
    other.epoch = table["epoch"] = 1
    monkeypatch.setitem(globals(), "WEIGHT", 2.0)
    assert watch.holds()


def test_asking_again_calls_few_functions():
    def step(x):
        return x * WEIGHT * OPTIONS.inner.weight * TABLE["inner"]["weight"] * SLOTS.weight * LIST[0] + ARRAY

    def calls_of(watch):
        calls = []
        sys.setprofile(lambda frame, event, arg: calls.append(event) if event == "call" else None)
        try:
            watch.holds()
        finally:
            sys.setprofile(None)
        return len(calls)

    assert [calls_of(Watch(f)) for f in (step, abs)] == [1, 1]


def test_what_a_step_changes_itself_is_left_out():
    counted = types.SimpleNamespace(calls=0, weight=1.0)

    def step(x):
        counted.calls += 1
        return x * counted.weight

    watch = Watch(step)
    step(1)
    watch.traced([])
    step(1)
    assert watch.holds()
    counted.weight = 2.0
    assert not watch.holds()


def test_a_variable_of_the_function_around_decides():
    weight = 1.0

    def step(x):
        return x * weight

    watch = Watch(step)
    assert watch.holds()
    weight = 2.0
    assert not watch.holds()


def test_a_list_that_is_shorter_and_a_cell_that_is_empty_decide():
    def make():
        weights = [1.0, 2.0]

        def forget():
            nonlocal weights
            del weights

        return weights, forget, lambda x: x * weights[1]

    weights, forget, step = make()
    watch = Watch(step)
    weights.pop()
    assert not watch.holds()
    weights.append(2.0)
    assert watch.holds()
    forget()
    assert not watch.holds()


def test_code_of_classes_does_not_run():
    class Guarded:
        __slots__ = ("__dict__", "empty")

        def __getattr__(self, name):
            raise AssertionError(name)

        @property
        def weight(self):
            raise AssertionError

    guarded = Guarded()
    watch = Watch(lambda x: x * guarded.weight + guarded.other + guarded["item"] + guarded.empty)
    watch.traced([])
    assert watch.holds()


def test_bytecode_that_cannot_be_read_is_not_watched(monkeypatch):
    def unreadable(code):
        raise AttributeError

    monkeypatch.setattr("unisono.step.programs._bytecode._own_reads", unreadable)
    monkeypatch.setitem(globals(), "WEIGHT", 1.0)
    watch = Watch(lambda x: x + WEIGHT)
    monkeypatch.setitem(globals(), "WEIGHT", 2.0)
    assert watch.holds()


def test_functions_that_call_each_other():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    assert Watch(even).holds()
    assert Watch(abs).holds()


def test_names_of_functions_with_many_names(monkeypatch):
    """Their instructions have a second byte for the number of a name."""
    names = {f"name{i}": 0 for i in range(300)}
    monkeypatch.setitem(globals(), "MANY", types.SimpleNamespace(**names))
    found = {}
    exec("def step():\n return " + " + ".join(f"MANY.{name}" for name in names), globals(), found)
    watch = Watch(found["step"])
    assert watch.holds()
    globals()["MANY"].name299 = 1
    assert not watch.holds()


def test_flags_that_a_step_sets_itself_are_left_out():
    variables = [types.SimpleNamespace(_trainable=True)]

    def traced():
        watch = Watch(abs)
        variables[0]._trainable = True
        watch.traced(variables)
        return watch

    first = traced()
    variables[0]._trainable = False
    assert not first.holds()
    again = traced()
    again.leave_out_flags_like(first)
    variables[0]._trainable = False
    assert again.holds()
