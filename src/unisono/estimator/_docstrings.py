"""Docstrings whose `Args`, `Returns` and `Raises` come from tables, for functions with the same arguments.

Arguments with which many functions end need not be spelled by each of them, either, and classes that differ
in their arguments alone are rows of a table, too.

Tests: tests/unit/estimator/test_docstrings.py.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

Documented = TypeVar("Documented", bound=Callable[..., Any])

#: The width of lines in `help()`, which indents them by four or eight.
_WIDTH = 100


@dataclasses.dataclass(frozen=True)
class Texts:
    """Fills in the docstrings of functions and classes, which it decorates.

    Args:
        args: what each argument is, by its name; also of arguments that only some of the functions have.
        returns: what a function returns; "" for a class.
        raises: when an error is raised, by the error's name.
        options_of: a function, whose arguments with defaults the decorated ones take for their `**options`.

    >>> @Texts({"x": "number.", "y": "number above 0."}, "The quotient.")
    ... def divide(x: float, y: float) -> float:
    ...     '''Divide two numbers.'''
    ...     return x / y
    >>> print(divide.__doc__)
    Divide two numbers.
    <BLANKLINE>
    Args:
        x: number.
        y: number above 0.
    <BLANKLINE>
    Returns:
        The quotient.
    """

    args: Mapping[str, str]
    returns: str = ""
    raises: Mapping[str, str] = dataclasses.field(default_factory=dict)
    options_of: Callable[..., Any] | None = None

    def with_texts(
        self,
        table: Mapping[str, str] | None = None,
        /,
        *,
        returns: str | None = None,
        raises: Mapping[str, str] | None = None,
        **args: str,
    ) -> Texts:
        """Return these texts with some others."""
        return dataclasses.replace(
            self,
            args={**self.args, **(table or {}), **args},
            returns=self.returns if returns is None else returns,
            raises=self.raises if raises is None else raises,
        )

    def __call__(self, documented: Documented) -> Documented:
        """Fill in a docstring, before its example.

        Args:
            documented: function or class, whose docstring has neither `Args`, `Returns` nor `Raises`.

        Raises:
            KeyError: an argument has no text.
        """
        if self.options_of is not None:
            documented = spelled_out(documented, self.options_of)
        # `python -OO` removes docstrings.
        if documented.__doc__:
            text, mark, example = inspect.cleandoc(documented.__doc__).partition(">>>")
            sections = [text.rstrip(), self.sections(inspect.signature(documented)), mark + example]
            documented.__doc__ = "\n\n".join(section for section in sections if section)
        return documented

    def sections(self, signature: inspect.Signature) -> str:
        """Return the sections for a signature, as `help()` shows them.

        Raises:
            KeyError: an argument has no text.
        """
        names = [name for name in signature.parameters if name != "self"]
        entries = {
            "Args": [f"{name}: {self.args[name]}" for name in names],
            "Returns": [self.returns] if self.returns else [],
            "Raises": [f"{error}: {text}" for error, text in self.raises.items()],
        }
        return "\n\n".join(
            "\n".join([f"{title}:", *(_wrapped(entry, 4 if title == "Returns" else 8) for entry in texts)])
            for title, texts in entries.items()
            if texts
        )


def spelled_out(function: Documented, other: Callable[..., Any]) -> Documented:
    """Return a function with arguments of another one, those with defaults, in place of its `**options`.

    They are taken by position, too, and the function gets those that a call gives.
    """
    own = inspect.signature(function)
    *named, last = own.parameters.values()
    if last.kind is not inspect.Parameter.VAR_KEYWORD:
        return function
    others = inspect.signature(other).parameters.values()
    added = [p for p in others if p.default is not p.empty and p.name not in own.parameters]
    signature = own.replace(parameters=[*named, *added])

    def call(*args: object, **kwargs: object) -> object:
        return function(**signature.bind(*args, **kwargs).arguments)

    # With the function's globals, by which doctest finds a module's functions, and its name, for tracebacks.
    code = call.__code__.replace(co_name=function.__name__)
    made: Any = types.FunctionType(code, function.__globals__, None, None, call.__closure__)
    functools.update_wrapper(made, function)
    made.__signature__ = signature
    documented: Documented = made
    return documented


def class_of(
    name: str,
    bases: tuple[type[Any], ...],
    doc: str,
    arguments: Iterable[inspect.Parameter],
    init: Callable[..., None],
) -> type[Any]:
    """Return a class with given arguments, in the module of the function `init`."""
    signature = inspect.Signature(list(arguments), return_annotation="None")

    def bound(self: object, *args: object, **kwargs: object) -> None:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        init(self, **given.arguments)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    bound.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[own, *signature.parameters.values()]
    )
    bound.__name__, bound.__qualname__ = "__init__", f"{name}.__init__"
    return type(name, bases, {"__init__": bound, "__doc__": doc, "__module__": init.__module__})


def argument(name: str, default: object, annotation: str) -> inspect.Parameter:
    """Return an argument for `class_of`; it must be given if the default is `inspect.Parameter.empty`."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


@functools.cache  # shared texts are many times the same
def _wrapped(entry: str, indent: int) -> str:
    return textwrap.fill(
        entry, _WIDTH, initial_indent=" " * 4, subsequent_indent=" " * indent, break_on_hyphens=False
    )
