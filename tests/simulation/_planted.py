"""Mistakes in functions that several modules have imported by their names: their code itself is replaced.

Tests: tests/unit/test_simulated_files.py.
"""

import contextlib
import dataclasses
import importlib
import inspect
import textwrap


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One mistake.

    Args:
        name: what is wrong, in a few words.
        place: the function, as `"package.module:Class.method"`.
        old: a text that occurs once in the function.
        new: what stands there instead.
        protocol: the name of the protocol that must find it.
    """

    name: str
    place: str
    old: str
    new: str
    protocol: str

    @property
    def protocols(self):
        """The protocols that can show it."""
        return (self.protocol,)

    @contextlib.contextmanager
    def planted(self):
        """Run the block with the mistake."""
        function = _function(self.place)
        source = textwrap.dedent(inspect.getsource(function))
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: {self.old!r} occurs {count} times in {self.place}")
        scope = {}
        tree = source[source.index("def ") :]
        names = function.__code__.co_freevars
        # Free variables, such as the class of `super`, belong to an outer function.
        lines = "\n".join(f"    {name} = None" for name in names) or "    pass"
        # Under another name: a method may call a function of the module that has its own.
        text = tree.replace(self.old, self.new).replace(f"def {function.__name__}(", "def _made(", 1)
        outer = f"def _outer():\n{lines}\n{textwrap.indent(text, '    ')}\n    return _made\n"
        future = "from __future__ import annotations\n"
        exec(compile(future + outer, function.__code__.co_filename, "exec"), function.__globals__, scope)
        made = scope["_outer"]()
        before = function.__code__
        function.__code__ = made.__code__.replace(co_name=before.co_name)
        try:
            yield
        finally:
            function.__code__ = before


def _function(place):
    module, _, path = place.partition(":")
    found = importlib.import_module(module)
    for name in path.split("."):
        found = found.__dict__[name] if isinstance(found, type) else getattr(found, name)
    if isinstance(found, property):
        found = found.fget
    return inspect.unwrap(getattr(found, "__func__", found))
