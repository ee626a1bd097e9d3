"""The protocols that are simulated, by name, and the mistakes that are planted in them."""

import functools
import importlib
import pkgutil

from tests import simulation


@functools.cache
def protocols():
    """Return all protocols: what each module `protocol_*` lists as `PROTOCOLS`."""
    found = {}
    for name in _modules("protocol_"):
        found.update(importlib.import_module(f"tests.simulation.{name}").PROTOCOLS)
    return found


@functools.cache
def mistakes():
    """Return all mistakes: what each module `mistakes_*` lists as `MISTAKES`."""
    found = []
    for name in _modules("mistakes_"):
        found += importlib.import_module(f"tests.simulation.{name}").MISTAKES
    return found


def _modules(prefix):
    return sorted(m.name for m in pkgutil.iter_modules(simulation.__path__) if m.name.startswith(prefix))
