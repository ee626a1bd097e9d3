"""Savable objects besides Keras' models: modules, and functions of given shapes and types.

Tests: tests/unit/tf/test_tensors.py and test_saved_modules.py.
"""

from __future__ import annotations

import re
from typing import Any

import keras

from unisono._saved._concrete import ConcreteFunction
from unisono._system._replacements import given, put
from unisono.checkpoint._contents import holds_objects
from unisono.checkpoint._tracking import Holder
from unisono.step.functions._function import BoundFunction, Function


class Module(Holder):
    """An object whose variables can be listed.

    Args:
        name: of the module.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        # As TensorFlow does: `MyModule` becomes `my_module`.
        self.name = name or re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()

    @property
    def variables(self) -> tuple[Any, ...]:
        """All variables of the module, and of what its attributes hold."""
        variables: dict[int, Any] = {}
        _collect(vars(self), variables, set())
        return tuple(variables.values())

    @property
    def trainable_variables(self) -> tuple[Any, ...]:
        """Those that training changes."""
        return tuple(v for v in self.variables if v.trainable)

    @property
    def objects(self) -> dict[str, Any]:
        """The objects of a checkpoint, by the names of the attributes."""
        kinds = (keras.Variable, keras.Layer, keras.Optimizer, keras.metrics.Metric, Holder)
        held = {name: value for name, value in vars(self).items() if name not in ("_objects", "_on_growth")}
        return {name: v for name, v in held.items() if isinstance(v, kinds) or holds_objects(v)}

    @property
    def submodules(self) -> tuple[Any, ...]:
        """The modules and layers below this one."""
        modules: dict[int, Any] = {}
        _collect_modules(vars(self), modules)
        return tuple(modules.values())


def _collect(value: object, variables: dict[int, keras.Variable], seen: set[int]) -> None:
    """Note the variables of what a module's attributes hold, each once."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if hasattr(value, "assign") and hasattr(value, "trainable"):
        variables[id(value)] = value
    elif isinstance(value, (Module, dict, list, tuple)):
        held = vars(value) if isinstance(value, Module) else value
        for item in [held[key] for key in sorted(held, key=str)] if isinstance(held, dict) else held:
            _collect(item, variables, seen)
    elif hasattr(value, "variables"):
        variables.update((id(variable), variable) for variable in value.variables)


def _collect_modules(value: object, modules: dict[int, Module | keras.Layer]) -> None:
    if isinstance(value, (Module, keras.Layer)):
        if id(value) not in modules:
            modules[id(value)] = value
            _collect_modules(
                vars(value) if isinstance(value, Module) else getattr(value, "layers", ()), modules
            )
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            _collect_modules(item, modules)


def add_methods() -> None:
    """Give functions the method `get_concrete_function`."""
    method = given(get_concrete_function)
    put(__name__, [(kind, "get_concrete_function", method) for kind in (Function, BoundFunction)])


def get_concrete_function(
    self: Function | BoundFunction, *args: object, **kwargs: object
) -> ConcreteFunction:
    """Return the function for given shapes and types; a saved model has it for these.

    Args:
        self: the function.
        *args: tensors, `tf.TensorSpec`s, and Python's objects.
        **kwargs: the same by name.
    """
    return ConcreteFunction(self, args, kwargs)
