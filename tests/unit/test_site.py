"""`make docs`: the site has every public name and no broken link."""

import html.parser
import http.server
import json
import shutil
import subprocess
import sys
import threading
import urllib.parse
from functools import partial
from pathlib import Path

import pytest
from tests import reference

site = pytest.importorskip("tools.site", reason="needs the extra `docs`", exc_type=ImportError)

ROOT = Path(__file__).parents[2]
BROWSER = shutil.which("chromium-headless-shell") or shutil.which("chromium")


class Page(html.parser.HTMLParser):
    """The anchors of a page and where its links lead."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.anchors |= {attrs["id"]} if attrs.get("id") else set()
        self.links |= {attrs[name] for name in ("href", "src") if attrs.get(name)}


@pytest.fixture(scope="module")
def built():
    done = subprocess.run(
        [sys.executable, "-m", "tools.site"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return ROOT / "site"


@pytest.fixture(scope="module")
def pages(built):
    return {path: Page(path.read_text()) for path in built.rglob("*.html")}


def test_docstrings_become_markdown():
    text = "Return 1.\n\n    >>> f()\n    1\n\nMore.\n\nTests: tests/x.py.\n"
    assert site.as_markdown(text) == "Return 1.\n\n    ```pycon\n    >>> f()\n    1\n    ```\n\nMore."


@pytest.mark.exhaustive
def test_every_public_name_has_an_anchor(built, pages):
    for module in reference.modules("unisono"):
        folder = built / "docs" / "reference"
        anchors = pages[folder / module.__name__ / "index.html"].anchors
        for path in (f"{module.__name__}.{name}" for name, _ in reference.public(module)):
            own = pages.get(folder / path / "index.html")
            assert path in (anchors if own is None else anchors | own.anchors)


@pytest.mark.exhaustive
def test_the_search_knows_the_page_of_a_class_by_its_name(built):
    """Its title is the name alone, and no other page has that title; a page of a class weighs more."""
    docs = json.loads((built / "search" / "search_index.json").read_text())["docs"]
    for name in ("MirroredStrategy", "Dataset", "BackupAndRestore", "Checkpoint", "Estimator"):
        titled = [entry for entry in docs if entry["title"] == name]
        boosted = [entry for entry in titled if entry.get("boost", 1) > 1]
        assert [
            entry["location"].rpartition(".")[2] for entry in boosted if "#" not in entry["location"]
        ] == [f"{name}/"]
        # The search takes what is typed for the beginning of a word.
        longer = [
            e["boost"] for e in docs if e["title"].startswith(name) and e["title"] != name and "boost" in e
        ]
        assert boosted[0]["boost"] > 2 * max(longer, default=1)
    for page in ("batch_size", "gradient_accumulation", "import_order", "mixed_precision", "out_of_memory"):
        (found,) = [entry for entry in docs if entry["location"] == f"docs/{page}/"]
        assert found["boost"] > 2 * 3


@pytest.mark.exhaustive
def test_links_within_the_site_lead_somewhere(built, pages):
    for path, page in pages.items():
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            # The page of what is not there has absolute addresses.
            if parts.scheme or path.name == "404.html":
                continue
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{path} links to {link}"
            if parts.fragment and target.suffix == ".html":
                anchors = pages[target].anchors | {"__tabbed_1_1"}
                assert urllib.parse.unquote(parts.fragment) in anchors, f"{path} links to {link}"


@pytest.mark.exhaustive
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_browser_shows_the_site_without_an_error(built):
    """The site loads its search in the browser, and nothing from elsewhere."""
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, text, request, code, *_):
            asked.append((request.split()[1], int(code)))

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=built)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--virtual-time-budget=10000",
            "--enable-logging=stderr",
        ]
        address = f"http://127.0.0.1:{server.server_port}/docs/data/"
        done = subprocess.run(
            [BROWSER, *flags, "--dump-dom", address],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        server.shutdown()
        thread.join()
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    assert 'class="js-focus-visible' in done.stdout, "its scripts have run"
    assert ("/search/search_index.json", 200) in asked
    assert {code for _, code in asked} == {200}
    assert "BackupAndRestore" in (built / "search" / "search_index.json").read_text()
