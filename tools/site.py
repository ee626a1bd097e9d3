"""Make the documentation site: `python -m tools.site` writes `site/` from the pages and from docstrings.

The pages of the reference, one for each public module and one for each of its classes, are made here;
mkdocstrings fills them. What is made at run time, such as functions for layers, it does not find in the
sources: `inspect` reads that. A name that is the same object in several modules has its text in the first.
"""

import inspect
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from types import FunctionType, ModuleType

import griffe

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "pages"
#: The package of npm that draws the diagrams.
MERMAID = "mermaid@11"
#: What the pages link to, apart from each other.
COPIED = ("*.md", "LICENSE", "docker", "docs", "examples")

#: A doctest, to the next empty line.
_EXAMPLE = re.compile(r"^( *)>>> .*?(?=\n\s*\n|\Z)", re.DOTALL | re.MULTILINE)
#: The begin of a link to another page or a picture.
_LINK = re.compile(r"\]\((?!https?://|#)(\.\./)?")
#: A picture in a paragraph of its own.
_PICTURE = re.compile(r"^(!\[[^\]]*\]\(([^)]+)\))$", re.MULTILINE)
_DIAGRAM = re.compile(r"^```mermaid\n.*?^```\n", re.DOTALL | re.MULTILINE)
_TESTS = re.compile(r"\n\s*Tests: .*\Z", re.DOTALL)
#: How much pages weigh in the search, where 1 is the weight of others: classes, old classes, classes whose
#: names begin other names (the search takes what is typed for a beginning), and answers that people look for.
_CLASS, _OLD_CLASS, _SHORT_CLASS, _ANSWER = 3, 2, 12, 8
#: Pages of such answers.
_ANSWERS = ("batch_size", "gradient_accumulation", "import_order", "mixed_precision", "out_of_memory")
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
    draw_diagrams(PAGES / "docs")
    for page in set((PAGES / "docs").glob("*.md")) - {PAGES / "docs" / "index.md"}:
        # A phone shows a large picture in its own size when it is touched.
        page.write_text(_PICTURE.sub(r"[\1](\2)", page.read_text()))
    for page in (PAGES / "docs" / f"{name}.md" for name in _ANSWERS):
        page.write_text(weighted(_ANSWER) + page.read_text())
    begin_with(PAGES / "docs" / "index.md")
    folder = PAGES / "docs" / "reference"
    folder.mkdir()
    package = griffe.load("unisono", search_paths=[ROOT / "src"], resolve_aliases=False)
    modules = reference.modules("unisono")
    homes = homes_of(modules)
    for module in modules:
        text = f"# {module.__name__}\n\n{as_markdown(inspect.getdoc(module) or '')}\n"
        parts = []
        for name, value in reference.public(module):
            path = f"{module.__name__}.{name}"
            if inspect.isclass(value) and homes[value] == path:
                (folder / f"{path}.md").write_text(class_page(package, homes, path, value))
            parts.append(part(package, homes, module, name, value))
        (folder / f"{module.__name__}.md").write_text(text + "".join(parts))

    def link(module, name):
        value, path = getattr(module, name), f"{module.__name__}.{name}"
        is_own_page = inspect.isclass(value) and homes[value] == path
        return f"reference/{path if is_own_page else module.__name__}.md#{path}"

    (PAGES / "docs" / "reference.md").write_text(reference.page(link))
    # `--strict` does not see the warnings that `--quiet` hides.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    # Material's advertisement for its successor.
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


def draw_diagrams(folder):
    """Put the script that draws diagrams beside the pages of a folder that have some, and frames around them.

    A phone shows a diagram as wide as it must be to be read, in a frame that moves sideways.
    Where npm is not there, or has no network, the theme loads it from elsewhere when a page is shown.
    """
    kept = ROOT / "build" / f"{MERMAID}.js"
    if not kept.exists() and (npm := shutil.which("npm")):
        with tempfile.TemporaryDirectory() as place:
            command = [npm, "pack", "--silent", "--fetch-timeout=60000", "--fetch-retries=1", MERMAID]
            done = subprocess.run(command, cwd=place, stdout=subprocess.DEVNULL, timeout=300, check=False)
            for archive in Path(place).glob("*.tgz") if done.returncode == 0 else ():
                with tarfile.open(archive) as file:
                    script = file.extractfile("package/dist/mermaid.min.js").read()
                kept.parent.mkdir(exist_ok=True)
                kept.write_bytes(script)
    script = ""
    if kept.exists():
        shutil.copy(kept, folder / "mermaid.min.js")
        # Of the page's own folder in the site.
        script = '\n<script src="../mermaid.min.js"></script>\n'
    else:
        print(f"Diagrams are drawn by a script from unpkg.com: npm has given no {MERMAID}.")
    for page in folder.glob("*.md"):
        framed, count = _DIAGRAM.subn(r'<div class="diagram" markdown>\n\n\g<0>\n</div>\n', page.read_text())
        if count:
            page.write_text(framed + script)


def begin_with(page):
    """Move a page of `docs` to the begin of the site, in place of the README, which is the repository's."""
    text = _LINK.sub(lambda link: "](" if link[1] else "](docs/", page.read_text())
    (PAGES / "README.md").write_text(text)
    page.unlink()


def homes_of(modules):
    """From each public class and function to its first name, which is its own where it has that."""
    from tests import reference

    every = [(module, name, value) for module in modules for name, value in reference.public(module)]
    every.sort(key=lambda entry: entry[1] != getattr(entry[2], "__name__", ""))
    homes = {}
    for module, name, value in every:
        if inspect.isclass(value) or inspect.isfunction(value):
            homes.setdefault(value, f"{module.__name__}.{name}")
    return homes


def part(package, homes, module, name, value):
    """The part of a module's page about one of its names."""
    from tests import reference

    path = f"{module.__name__}.{name}"
    if isinstance(value, ModuleType):
        page = "../migrating_names.md" if name == "tf" else f"{value.__name__}.md"
        return f"\n## {name} {{#{path}}}\n\nThe module [{value.__name__}]({page}).\n"
    # `data.experimental.load` is a method of a class that has its page.
    home = homes.get(value, path) if isinstance(value, (type, FunctionType)) else path
    if inspect.isclass(value):
        anchor = f" {{#{path}}}" * (home != path)
        return f"\n## [{name}]({home}.md){anchor}\n\n{reference.sentence(value)}\n"
    if home != path:
        return f"\n## {name} {{#{path}}}\n\nThe same as [{home}]({home.rpartition('.')[0]}.md#{home}).\n"
    return definition(package, path, value)


def weighted(boost, title=None):
    """The head of a page that says how much it weighs in the search."""
    named = "" if title is None else f"title: {title}\n"
    return f"---\n{named}search:\n  boost: {boost}\n---\n\n"


def class_page(package, homes, path, value):
    """The page of a class, which the search of the site shows first for its name."""
    from tests import reference

    name = path.rpartition(".")[2]
    bases = [base for base in value.__mro__[1:] if homes.get(base) and reference.members(base)]
    own = [m for m in reference.members(value) if m not in vars(value)]
    classes = (home.rpartition(".")[2].lower() for thing, home in homes.items() if inspect.isclass(thing))
    begins_others = any(other.startswith(name.lower()) and other != name.lower() for other in classes)
    # Old names come after those of today.
    boost = _OLD_CLASS if "experimental" in path else _SHORT_CLASS if begins_others else _CLASS
    text = f"{weighted(boost, name)}# {name}\n"
    text += definition(package, path, value, f"    options:\n      inherited_members: {own}\n" if own else "")
    for base in bases:
        listed = ", ".join(f"`{member}`" for member in reference.members(base))
        text += f"\nAlso what [{homes[base].rpartition('.')[2]}]({homes[base]}.md) has: {listed}.\n"
    return text


def definition(package, path, value, options=""):
    """The text about a function or class, which mkdocstrings reads in the sources where they have it."""
    if is_in_sources(package, path):
        return f"\n::: {path}\n{options}"
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
