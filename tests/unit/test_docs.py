"""Documents: links lead somewhere, every page can be found, lines are short."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")]
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in FILES}


def links(text):
    return [target for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]


def anchors(text):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in links(PAGES[page]):
        path, _, anchor = target.partition("#")
        found = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert found.exists(), f"{page} links to {target}"
        if anchor:
            assert anchor in anchors(found.read_text()), f"{page} links to {target}"


def test_the_readme_is_read_in_five_minutes_and_begins_with_the_changed_lines():
    lines = PAGES["README.md"].splitlines()
    assert len(lines) <= 200
    # The three lines that change, then how to try them, before the middle reasons and exactness.
    headings = [line for line in lines if line.startswith("## ")]
    assert headings[:4] == ["## Try it", "## Keras fit", "## Why, and when not", "## Exactness"]
    assert lines.index("+strategy = unisono.MirroredStrategy()  # all GPUs") < lines.index("## Try it") < 25
    assert lines.index("## Exactness") < len(lines) / 2


@pytest.mark.parametrize("page", PAGES)
def test_lines_are_short(page):
    """Rows of tables and code cannot be broken."""
    prose = re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)
    assert not [line for line in prose.splitlines() if len(line) > 120 and not line.startswith("|")]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_code_has_a_language_that_is_checked(page):
    """`tests/virtual/test_docs_blocks.py` checks it, unless `<!-- fragment -->` stands above it."""
    marks = re.findall(r"^(<!-- fragment -->\n)? *```(\w*)\n.*?^ *```", PAGES[page], re.MULTILINE | re.DOTALL)
    assert {kind for mark, kind in marks if not mark} <= {"json", "mermaid", "python", "sh", "text", "yaml"}


#: Clauses where a noun belongs ("Return the reader of …", "The results of …", "True if …", "the steps of one
#: device"), and vague names, with their numbers in sources and documents, which may only shrink.
CLAUSES = {
    r"\bReturn what\b": 134,
    r'("""|#: )What\b': 189,
    r'("""|#: )Whether\b': 92,
    r"\b(those|that)\s+of\b|\bone\s+that\b": 268,
    r"\bas there\b": 9,
    r"\bfound(: [^=\n]+)? = ": 162,
    r"\bdef take\b|\b_meet\b|\bwish\b|\bclass Turn\b": 41,
}


@pytest.mark.parametrize("clause", CLAUSES)
def test_sentences_name_their_subject(clause):
    sources = [path.read_text() for path in sorted((ROOT / "src").rglob("*.py"))]
    number = sum(len(re.findall(clause, text)) for text in [*sources, *PAGES.values()])
    assert number <= CLAUSES[clause], (
        f"{number} times, not {CLAUSES[clause]}: write a noun in place of {clause!r}"
    )
    assert number == CLAUSES[clause], f"{number} are left of {CLAUSES[clause]}: lower the number"


def test_the_first_files_to_read_exist():
    files = re.findall(r"^\d\. `([\w/]+\.py)`", PAGES["CONTRIBUTING.md"], re.MULTILINE)
    assert len(files) == 6
    assert not [file for file in files if not (ROOT / "src/unisono" / file).exists()]


def test_every_page_of_docs_can_be_found():
    linked = {Path(target.partition("#")[0]).name for text in PAGES.values() for target in links(text)}
    assert {path.name for path in ROOT.glob("docs/*.md")} <= linked


def test_every_page_has_a_place_in_the_menu_of_the_site():
    menu = re.findall(r"[\w/]+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "examples" / "README.md"]
    # The site begins with docs/index.md in the README's place.
    expected = {str(path.relative_to(ROOT)) for path in pages} - {"docs/index.md"}
    assert set(menu) == expected, "add the page to `nav` in mkdocs.yml"


def templates():
    """The texts in the library's sources, with `…` in place of what differs."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                yield "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"%[\d.+-]*[sdrgf]", "…", node.value)


def test_quoted_messages_are_in_the_source():
    ours = PAGES["docs/messages.md"].partition("## What is not Unisono's")[0]
    quoted = re.findall(r"^\| (?:`([^`]+)`|`` (.+?)``) \|", ours, re.MULTILINE)
    rows = re.findall(r"^\| (?!message |---)", ours, re.MULTILINE)
    assert len(quoted) == len(rows) > 40
    text = "\n".join(templates())
    assert not [message for message in map("".join, quoted) if message.rstrip("…. ") not in text]
