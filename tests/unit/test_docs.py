"""Documents: links lead somewhere, every page can be found, lines are short."""

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


@pytest.mark.parametrize("page", PAGES)
def test_lines_are_short(page):
    """Rows of tables and code cannot be broken."""
    prose = re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)
    assert not [line for line in prose.splitlines() if len(line) > 120 and not line.startswith("|")]


def test_every_page_of_docs_can_be_found():
    linked = {Path(target.partition("#")[0]).name for text in PAGES.values() for target in links(text)}
    assert {path.name for path in ROOT.glob("docs/*.md")} <= linked
