"""Every public name of TensorFlow 1's modules has a whole docstring in `help()`."""

import importlib
import inspect
import re

import pytest

from unisono.estimator._docstrings import Texts


def public(folder):
    """The functions, classes and public methods that a module or a package defines itself."""
    module = importlib.import_module(f"unisono.estimator.{folder}")
    for name in module.__all__:
        value = getattr(module, name)
        if not callable(value) or not value.__module__.startswith(module.__name__):
            continue
        yield name, value
        for own, method in vars(value).items() if inspect.isclass(value) else ():
            if inspect.isroutine(method) and not own.startswith("_"):
                yield f"{name}.{own}", getattr(value, own)


@pytest.mark.parametrize("folder", ["inputs", "layers", "losses", "metrics", "summary", "train"])
def test_docstrings_are_whole(folder):
    for name, value in public(folder):
        text, signature = inspect.getdoc(value), inspect.signature(value)
        assert re.match(r"[A-Z][^\n]*\.(\n\n|$)", text), f"{name} begins with one sentence"
        section = text.partition("\nArgs:\n")[2].partition("\n\n")[0]
        named = re.findall(r"^ {4}(\w+): \S", section, re.MULTILINE)
        assert named == [p for p in signature.parameters if p != "self"], name
        if not inspect.isclass(value) and signature.return_annotation != "None":
            assert "Returns:\n" in text or not signature.parameters, name
        assert not re.search(r"likewise|as there|is not used|here and below|that follow", text), name


def test_texts_are_put_before_the_example():
    texts = Texts({"x": "number.", "other": "not of this function."}, "The half.", {"TypeError": "never."})

    @texts.with_texts(y="number; its default is 2.")
    def halve(x, y=2):
        """Divide.

        More of it.

        >>> 1
        1
        """

    assert halve.__doc__.split("\n\n") == [
        "Divide.",
        "More of it.",
        "Args:\n    x: number.\n    y: number; its default is 2.",
        "Returns:\n    The half.",
        "Raises:\n    TypeError: never.",
        ">>> 1\n1",
    ]


def test_an_argument_without_a_text_is_an_error():
    with pytest.raises(KeyError, match="z"):

        @Texts({})
        def function(z):
            """Do nothing."""


def test_without_docstrings_nothing_is_filled_in():
    def function(z):
        pass

    assert Texts({})(function).__doc__ is None


def test_options_are_spelled_out():
    def ending(value, scale=1, unit="m"):
        return f"{value * scale} {unit}"

    @Texts({"x": "number.", "scale": "number.", "unit": "string."}, options_of=ending)
    def doubled(x, **options):
        """Return twice a number."""
        return ending(2 * x, **options)

    assert str(inspect.signature(doubled)) == "(x, scale=1, unit='m')"
    assert "Args:\n    x: number.\n    scale: number.\n    unit: string." in doubled.__doc__
    assert [doubled(3), doubled(3, 2, "km"), doubled(x=3, unit="km")] == ["6 m", "12 km", "6 km"]
    with pytest.raises(TypeError, match="other"):
        doubled(3, other=1)
    # So that doctest finds it, and a traceback names it.
    assert (doubled.__globals__, doubled.__code__.co_name) == (globals(), "doubled")
