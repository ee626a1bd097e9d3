"""The command `unisono timeline`: a job as a page, which needs no network, and as a trace for Perfetto.

Tests: tests/cluster/test_timeline.py.
"""

from __future__ import annotations

import json
from pathlib import Path

from unisono._errors import InvalidArgumentError
from unisono.cli._timeline import read, trace_of
from unisono.watch._places import mark_of_launch, reader_of
from unisono.watch.web._page import make_page
from unisono.watch.web._page_reader import PageReader


def main(folder: Path) -> str:
    """Write `timeline.html` and `timeline.json` into the log folder; return what to say."""
    page, trace = write(folder)
    why = " (`unisono watch` has kept it with the tasks' steps, which are gone)" if _is_kept(folder) else ""
    return f"{page}: open it in a browser{why}\n{trace}: open it at https://ui.perfetto.dev"


def _is_kept(folder: Path) -> bool:
    """Return whether the page there is of this launch and cannot be made again: its tasks wrote elsewhere."""
    mark = mark_of_launch(folder).encode()
    page = folder / "timeline.html"
    return bool(mark) and page.is_file() and page.read_bytes().rstrip().endswith(mark)


def write(folder: Path) -> tuple[Path, Path]:
    """Write `timeline.html` and `timeline.json` into the log folder, and return their paths.

    A page that `unisono watch` has kept is left as it is, where the steps of the tasks are gone.

    Raises:
        InvalidArgumentError: when no launch has written the folder, or it cannot be written.
    """
    trace = trace_of(read(folder))
    page = None if _is_kept(folder) else page_of(folder)
    paths = folder / "timeline.html", folder / "timeline.json"
    try:
        if page is not None:
            paths[0].write_text(page, encoding="utf-8", errors="replace")
        paths[1].write_text(json.dumps(trace))
    except OSError as error:
        raise InvalidArgumentError(
            f"The log folder must be writable. Received: {str(folder)!r} ({error.strerror}). Write "
            "`unisono timeline` with the path of a copy."
        ) from None
    return paths


def page_of(folder: Path) -> str:
    """Return the page of a launch, with its data and the end of each task's log."""
    facts = PageReader(reader_of(folder)).last()
    job = facts["job"]
    title = str(job["title"]) if isinstance(job, dict) else ""
    return make_page(title, facts)
