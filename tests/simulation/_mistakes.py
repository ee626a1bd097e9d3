"""Mistakes planted in the project's code, to see whether the simulation finds them.

A mistake is a text of a function that is replaced by another one, as a patch of its source would.
`mistakes_*.py` have tables of them; `python -m tests.simulation --mistakes` tries all.

Tests: tests/unit/test_simulation.py.
"""

import __future__

import contextlib
import dataclasses
import functools
import importlib
import inspect


@dataclasses.dataclass(frozen=True)
class Mistake:
    """An error that somebody could make.

    Args:
        name: what is wrong.
        protocols: the names of the protocols that can show it.
        where: `module:function` or `module:Class.method`; without `unisono.`.
        old, new: what is replaced in the function's source, once.
        more: further places of the same mistake, each as (where, old, new).
    """

    name: str
    protocols: tuple[str, ...]
    where: str
    old: str
    new: str
    more: tuple[tuple[str, str, str], ...] = ()

    @contextlib.contextmanager
    def planted(self):
        """Plant it during a block."""
        with contextlib.ExitStack() as stack:
            for where, old, new in ((self.where, self.old, self.new), *self.more):
                stack.enter_context(_rewritten(where, old, new))
            yield


@contextlib.contextmanager
def _rewritten(where, old, new):
    module_name, _, path = where.partition(":")
    module = importlib.import_module(f"unisono.{module_name}")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, module)
    real = vars(owner)[name]
    function = real.fget if isinstance(real, property) else real
    function = getattr(function, "__func__", function)
    text = inspect.getsource(inspect.unwrap(function))
    if text.count(old) != 1:
        raise ValueError(f"{where} must have this text once. Received: {text.count(old)} times {old!r}.")
    text = ("if True:\n" if text[0].isspace() else "") + text.replace(old, new)
    code = compile(text, f"<mistake in {where}>", "exec", __future__.annotations.compiler_flag, True)
    names = {}
    exec(code, vars(module), names)
    made = names[name]
    made = made.fget if isinstance(made, property) else getattr(made, "__func__", made)
    # The code itself: other modules may have imported the function by its name.
    changed = inspect.unwrap(function)
    before, changed.__code__ = changed.__code__, inspect.unwrap(made).__code__
    try:
        yield
    finally:
        changed.__code__ = before
        for value in list(vars(module).values()):
            # What it has returned with the mistake is forgotten.
            if getattr(value, "__wrapped__", None) is changed and hasattr(value, "cache_clear"):
                value.cache_clear()
