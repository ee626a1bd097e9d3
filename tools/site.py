"""Make the documentation site: `python -m tools.site` writes `site/` from the pages and from docstrings.

The pages of the reference, one for each public module, are made here; mkdocstrings fills them. What is
made at run time, such as functions for layers, it does not find in the sources: `inspect` reads that.
"""

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import griffe

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "pages"
#: What the pages link to, apart from each other.
COPIED = ("*.md", "LICENSE", "docker", "docs", "examples")

#: A doctest, to the next empty line.
_EXAMPLE = re.compile(r"^( *)>>> .*?(?=\n\s*\n|\Z)", re.DOTALL | re.MULTILINE)
#: The begin of a link to another page or a picture.
_LINK = re.compile(r"\]\((?!https?://|#)(\.\./)?")
_TESTS = re.compile(r"\n\s*Tests: .*\Z", re.DOTALL)
_ENTRY = re.compile(r"^    (\*{0,2}\w+): ", re.MULTILINE)


def as_markdown(text):
    """Return a docstring with its examples fenced, and without the line that names its tests."""
    return _EXAMPLE.sub(r"\1```pycon\n\g<0>\n\1```", _TESTS.sub("", text))


class Docstrings(griffe.Extension):
    """Makes Markdown of each docstring that mkdocstrings reads."""

    def on_instance(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)


def main():
    from tests import reference

    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir(parents=True)
    for path in (path for pattern in COPIED for path in ROOT.glob(pattern)):
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, PAGES / path.name)
    begin_with(PAGES / "docs" / "index.md")
    folder = PAGES / "docs" / "reference"
    folder.mkdir()
    package = griffe.load("unisono", search_paths=[ROOT / "src"], resolve_aliases=False)
    for module in reference.modules("unisono"):
        text = f"# {module.__name__}\n\n{as_markdown(inspect.getdoc(module) or '')}\n"
        parts = [part(package, module, name, value) for name, value in reference.public(module)]
        (folder / f"{module.__name__}.md").write_text(text + "".join(parts))
    (PAGES / "docs" / "reference.md").write_text(reference.page(link=lambda path: f"reference/{path}.md"))
    # `--strict` does not see the warnings that `--quiet` hides.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    # Material's advertisement for its successor.
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


def begin_with(page):
    """Move a page of `docs` to the begin of the site, in place of the README, which is the repository's."""
    text = _LINK.sub(lambda link: "](" if link[1] else "](docs/", page.read_text())
    (PAGES / "README.md").write_text(text)
    page.unlink()


def part(package, module, name, value):
    """The part of a module's page about one of its names."""
    path = f"{module.__name__}.{name}"
    if isinstance(value, ModuleType):
        page = "../migrating_names.md" if name == "tf" else f"{value.__name__}.md"
        return f"\n## {name} {{#{path}}}\n\nThe module [{value.__name__}]({page}).\n"
    if is_in_sources(package, path):
        return f"\n::: {path}\n"
    signature, doc = f"{path} = {value!r}", ""
    if inspect.isfunction(value) or inspect.isclass(value):
        signature, doc = f"{path}{inspect.signature(value)}", as_markdown(inspect.getdoc(value))
    doc = re.sub(r"^(Args|Returns|Raises):\n", r"**\1:**\n\n", doc, flags=re.MULTILINE)
    doc = re.sub(r"^ {4}(?=\S)", "", _ENTRY.sub(r"- `\1`: ", doc), flags=re.MULTILINE)
    return f"\n## {path} {{#{path}}}\n\n```python\n{signature}\n```\n\n{doc}\n"


def is_in_sources(package, path):
    """Whether the sources define a name by a class or a function."""
    try:
        found = package[path.removeprefix("unisono.")]
        return (found.final_target if found.is_alias else found).kind in {
            griffe.Kind.CLASS,
            griffe.Kind.FUNCTION,
        }
    except (griffe.AliasResolutionError, KeyError):
        return False


if __name__ == "__main__":
    sys.exit(main())
