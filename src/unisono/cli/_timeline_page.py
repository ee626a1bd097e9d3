"""The command `unisono timeline`: a job as a page, which needs no network, and as a trace for Perfetto.

Tests: tests/cluster/test_timeline.py.
"""

from __future__ import annotations

import json
from pathlib import Path

from unisono._errors import InvalidArgumentError
from unisono.cli._timeline import read, trace_of
from unisono.watch._job_reader import JobReader
from unisono.watch._log_folder import LocalFolder
from unisono.watch.web._page import make_page
from unisono.watch.web._page_reader import PageReader


def main(folder: Path) -> str:
    """Write `timeline.html` and `timeline.json` into the log folder; return what to say."""
    page, trace = write(folder)
    return f"{page}: open it in a browser\n{trace}: open it at https://ui.perfetto.dev"


def write(folder: Path) -> tuple[Path, Path]:
    """Write `timeline.html` and `timeline.json` into the log folder, and return their paths.

    Raises:
        InvalidArgumentError: when no launch has written the folder, or it cannot be written.
    """
    trace = trace_of(read(folder))
    page = page_of(folder)
    paths = folder / "timeline.html", folder / "timeline.json"
    try:
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
    facts = PageReader(JobReader(LocalFolder(folder))).last()
    job = facts["job"]
    title = str(job["title"]) if isinstance(job, dict) else ""
    return make_page(title, facts)
