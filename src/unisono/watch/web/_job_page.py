"""The page of a job: served while the job runs, and a file in its log folder at the end."""

from __future__ import annotations

import contextlib
import getpass
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from unisono._errors import InvalidArgumentError
from unisono.cli import _timeline_page
from unisono.launcher import _launch
from unisono.launcher._options import LaunchOptions, UserProgram
from unisono.watch._job_reader import JobReader
from unisono.watch._log_folder import LocalFolder, LogFolder
from unisono.watch._places import mark_of_launch
from unisono.watch._server_folder import JoinedFolder
from unisono.watch.web._job_feed import JobFeed
from unisono.watch.web._page import make_page
from unisono.watch.web._page_reader import PageReader
from unisono.watch.web._page_server import PageServer

#: Seconds between two looks whether the job has ended.
_LOOK = 1.0


@contextlib.contextmanager
def job_page(reader: PageReader, address: str, say: Callable[[str], None]) -> Iterator[None]:
    """Serve the page of a job for a block; at its end, pages that are open get the job as it is then.

    Args:
        address: `"host:port"` to listen at; port 0 is a free one.
        say: shows a line to people.

    Raises:
        InvalidArgumentError: when the address cannot be listened at.
    """
    feed = JobFeed(reader.read, lambda: reader.is_behind)
    try:
        server = PageServer(feed, reader.log_of, address)
    except InvalidArgumentError:
        feed.end()
        raise
    try:
        for line in reach(server):
            say(line)
        yield
    finally:
        feed.end(reader.last)
        server.close()


def reach(server: PageServer) -> list[str]:
    """Return how people get to a page."""
    lines = [f"unisono: watch the job at {server.address}"]
    if server.is_local:
        host = f"{_user()}{socket.gethostname()}"
        lines.append(
            f"unisono: from another machine, `ssh -L {server.port}:{server.target} {host}`, then that address"
        )
    return lines


def _user() -> str:
    try:
        return f"{getpass.getuser()}@"
    except (KeyError, OSError):  # a container whose user has no name
        return ""


def _write_copy(log_dir: Path, say: Callable[[str], None]) -> None:
    """Write the page as a file, where the launch has begun and the disk has room."""
    try:
        path, _ = _timeline_page.write(log_dir)
    except InvalidArgumentError as error:
        say(f"unisono: the page is not kept: {error}")
        return
    say(f"unisono: the page is kept in {path}")


def _write_page(reader: PageReader, folder: LogFolder, say: Callable[[str], None]) -> None:
    """Write the page of a job whose files are elsewhere, as they were read: in its log folder, or here."""
    facts = reader.last()
    job = facts["job"]
    title = str(job["title"]) if isinstance(job, dict) else ""
    root = folder.local_root if isinstance(folder, JoinedFolder) else None
    name = "timeline.html" if root else f"timeline-{re.sub('[^A-Za-z0-9._]+', '-', title)[:80]}.html"
    path = (root or Path.cwd()) / name
    try:
        text = make_page(title, facts) + (mark_of_launch(root) if root else "")
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        say(f"unisono: the page is not kept: {path} cannot be written ({error.strerror})")
        return
    say(f"unisono: the page is kept in {path}")


def launch_with_page(
    options: LaunchOptions,
    program: UserProgram,
    log_dir: Path | None,
    address: str,
    say: Callable[[str], None],
) -> int:
    """Launch a program and serve its page until it ends; return the launcher's exit code.

    Raises:
        InvalidArgumentError: when the address cannot be listened at, or `run_program` raises it.
    """
    _launch.check_program(program)
    root = _launch.make_run_paths(log_dir).root
    with job_page(PageReader(JobReader(LocalFolder(root))), address, say):
        code = _launch.run_program(options, program, root)
    _write_copy(root, say)
    return code


def watch_on_page(job: JobReader, address: str, say: Callable[[str], None]) -> None:
    """Serve the page of a job until it ends, or Ctrl-C; after its end until Ctrl-C.

    Raises:
        InvalidArgumentError: when the address cannot be listened at.
    """
    reader = PageReader(job)
    try:
        with job_page(reader, address, say):
            reader.read()
            has_ended = reader.is_over
            while has_ended or not reader.is_over:
                time.sleep(_LOOK)
                if not has_ended:
                    reader.read()
    except KeyboardInterrupt:
        return
    if isinstance(job.folder, LocalFolder):
        _write_copy(job.folder.root, say)
    else:
        _write_page(reader, job.folder, say)
