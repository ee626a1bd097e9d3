"""`docs/reference.md`, made from the stubs and docstrings: `python -m tests.reference` writes it."""

import importlib
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
HEAD = """# Public names

Every public name with the first sentence of its documentation; `help(unisono.MirroredStrategy)` shows the
rest. `python -m tests.reference` makes this page. TensorFlow's names, `from unisono import tf`, are in
[migrating.md](migrating.md).
"""


def page():
    """The text of the page."""
    return HEAD + "".join(section(module) for module in modules("unisono"))


def modules(name):
    """A public module and those below it, in the order of their names."""
    module = importlib.import_module(name)
    paths = (f"{name}.{inner}" for inner, value in public(module) if isinstance(value, ModuleType))
    # `experimental.coordinator` and the like are other names of modules.
    below = [path for path in paths if path in sys.modules and path != "unisono.tf"]
    return [module, *(inner for path in below for inner in modules(path))]


def public(module):
    """The names of a module with their values."""
    names = getattr(module, "__all__", None) or [
        name for name, value in vars(module).items()
        if name[0] != "_" and getattr(value, "__module__", "") == module.__name__
    ]  # fmt: skip
    return [(name, getattr(module, name)) for name in sorted(names) if name != "__version__"]


def section(module):
    """The part of the page about a module."""
    rows = [f"| `{name}` | {sentence(value)} |\n" for name, value in public(module)]
    table = "\n| name | what it is |\n|---|---|\n" + "".join(rows)
    return f"\n## `{module.__name__}`\n\n{sentence(module)}\n{table}"


def sentence(value):
    """The first paragraph of a documentation, in one line; the value of a constant."""
    if not (inspect.isclass(value) or inspect.isfunction(value) or isinstance(value, ModuleType)):
        return f"`{value!r}`" if isinstance(value, (int, str)) else type(value).__name__
    paragraph = (inspect.getdoc(value) or "").partition("\n\n")[0]
    return re.sub(r"\s+", " ", paragraph).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
