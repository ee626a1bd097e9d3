"""The pages of names, made from stubs, docstrings and the table: `python -m tests.reference` writes them."""

import functools
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
[migrating_names.md](migrating_names.md).
"""

TF_PAGE = PAGE.with_name("migrating_names.md")
TF_HEAD = """# Names of `unisono.tf`

The object behind each name of TensorFlow, for programs as [migrating.md](migrating.md) describes them.
Names of `tf.keras` that are Keras 3's own are not listed. `python -m tests.reference` makes this page.

"""

AREAS = {
    "tf.distribute": ("distribute.",),
    "tf.keras, where it differs from Keras 3": ("keras.",),
    "tf.data": ("data.",),
    "tf.train, tf.saved_model, tf.summary, tf.io": ("train.", "saved_model.", "summary.", "io.", "gfile."),
    "tf.config, tf.tpu, tf.random, tf.image": (
        "config.", "tpu.", "random.", "image.", "test.", "debugging.", "logging.",
    ),
    "tf.nn, tf.math, tf.linalg": ("nn.", "math.", "linalg.", "bitwise."),
    "TensorFlow 1": ("contrib.", "compat.", "layers.", "losses.", "metrics.", "estimator."),
}  # fmt: skip


def page(link=None):
    """The text of the page; `link` gives the page of a module, to which its names are linked then."""
    return HEAD + "".join(section(module, link) for module in modules("unisono"))


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


def section(module, link=None):
    """The part of the page about a module."""

    def row(name, value):
        shown = f"[`{name}`]({link(module, name)})" if link else f"`{name}`"
        own = members(value) if inspect.isclass(value) else []
        return (
            f"| {shown} | {sentence(value)}{' Members: ' * bool(own)}{', '.join(f'`{m}`' for m in own)} |\n"
        )

    rows = [row(name, value) for name, value in public(module)]
    table = "\n| name | what it is |\n|---|---|\n" + "".join(rows)
    return f"\n## `{module.__name__}`\n\n{sentence(module)}\n{table}"


def members(cls):
    """The documented names of a class, without those of public classes and other packages among its bases."""
    inherited = {name for base in cls.__mro__[1:] if is_documented_elsewhere(base) for name in dir(base)}
    return sorted(
        name for name in dir(cls) if name[0] != "_" and name not in inherited and is_documented(cls, name)
    )


def is_documented_elsewhere(base):
    """Whether a class has a page of its own, or belongs to another package."""
    return not base.__module__.startswith("unisono") or base in public_classes()


@functools.cache
def public_classes():
    """All public classes."""
    every = (value for module in modules("unisono") for _, value in public(module))
    return {value for value in every if inspect.isclass(value)}


def is_documented(cls, name):
    """Whether a member says what it is: by a docstring, as an enumeration's, or in that of its class."""
    value = inspect.getattr_static(cls, name)
    if isinstance(value, cls) or name.isupper():
        return True
    if inspect.isroutine(value) or isinstance(value, (property, functools.cached_property)):
        return bool(
            inspect.getdoc(getattr(cls, name) if isinstance(value, (classmethod, staticmethod)) else value)
        )
    texts = "".join(inspect.getdoc(base) or "" for base in cls.__mro__ if base is not object)
    return re.search(rf"\b{name}\b", texts) is not None


def sentence(value):
    """The first paragraph of a documentation, in one line; the value of a constant."""
    if not (inspect.isclass(value) or inspect.isfunction(value) or isinstance(value, ModuleType)):
        return f"`{value!r}`" if isinstance(value, (int, str)) else type(value).__name__
    paragraph = (inspect.getdoc(value) or "").partition("\n\n")[0]
    return re.sub(r"\s+", " ", paragraph).replace("|", "\\|")


def tf_page():
    """The text of the page about TensorFlow's names."""
    return TF_HEAD + "\n\n".join(_tables()) + "\n"


def _tables():
    from unisono.tf._table import TABLE

    rest = dict(TABLE.entries)
    for title, prefixes in AREAS.items():
        chosen = {name: entry for name, entry in rest.items() if name.startswith(prefixes)}
        rest = {name: entry for name, entry in rest.items() if name not in chosen}
        if chosen:
            yield _table(title, chosen)
    yield _table("Other names", rest)


def _table(title, entries):
    rows = [f"| `tf.{name}` | {_here(entry)} |" for name, entry in sorted(entries.items())]
    return "\n".join([f"## {title}", "", "| TensorFlow | here |", "|---|---|", *rows])


def _here(entry):
    from unisono.tf._entries import Missing

    if isinstance(entry, Missing):
        return f"{entry.why}: write {entry.write}"
    shown = "as in TensorFlow" if "._" in entry.path else f"`{entry.path}`"
    return f"{shown}; {entry.note}" if entry.note else shown


if __name__ == "__main__":
    PAGE.write_text(page())
    TF_PAGE.write_text(tf_page())
