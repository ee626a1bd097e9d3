"""The page: one file of HTML with its style and its scripts in it, which loads nothing from elsewhere."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
from collections.abc import Mapping
from importlib import resources

_FOLDER = resources.files("unisono.watch.web") / "page"
#: In the order in which the browser runs them.
_SCRIPTS = ("1_format.js", "2_canvas.js", "3_chart.js", "4_timeline.js", "5_tables.js", "6_page.js")


@functools.cache
def _part(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


@functools.cache
def _script() -> str:
    # Within a function, so that no name of the page is visible to what a browser adds to pages.
    parts = "\n".join(_part(name) for name in _SCRIPTS)
    return f'(() => {{\n"use strict";\n{parts}\n}})();'


@functools.cache
def policy() -> str:
    """Return the page's Content-Security-Policy: its own style and script, and the server that it is from.

    >>> policy().partition(";")[0]
    "default-src 'none'"
    """
    hashes = {name: _hash(text) for name, text in (("script", _script()), ("style", _part("page.css")))}
    return (
        f"default-src 'none'; script-src '{hashes['script']}'; style-src '{hashes['style']}'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def make_page(title: str, data: Mapping[str, object]) -> str:
    """Return the page.

    Args:
        data: `job`, as `PageReader.read` returns it, or None, and the page asks its server for it; `logs`,
            the end of each task's log by its name.

    >>> "</script>" in make_page("train.py", {"job": {"title": "</script>"}}).partition("<script>")[0][:-10]
    False
    """
    # In a script's text, `<` could begin an end tag.
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    parts = {
        "policy": html.escape(policy()), "title": html.escape(title), "style": _part("page.css"),
        "data": text, "script": _script(),
    }  # fmt: skip
    # Piece by piece: a part may hold braces.
    first, *pieces = _part("page.html").split("{{")
    halves = (piece.partition("}}") for piece in pieces)
    return first + "".join(parts[name] + rest for name, _, rest in halves)
