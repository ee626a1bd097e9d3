"""The page of a job: served while the job runs, and a file in its log folder at the end."""

from __future__ import annotations

import contextlib
import getpass
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from unisono._errors import InvalidArgumentError
from unisono.cli import _timeline_page
from unisono.launcher import _launch
from unisono.launcher._options import LaunchOptions, UserProgram
from unisono.watch._log_folder import LocalFolder
from unisono.watch.web._job_feed import JobFeed
from unisono.watch.web._page_reader import PageReader
from unisono.watch.web._page_server import PageServer

#: Seconds between two looks whether the job has ended.
_LOOK = 1.0


@contextlib.contextmanager
def job_page(log_dir: Path, address: str, say: Callable[[str], None]) -> Iterator[PageReader]:
    """Serve the page of a job for a block; at its end, pages that are open get the job as it is then.

    Args:
        log_dir: of the launch, which may begin later.
        address: `"host:port"` to listen at; port 0 is a free one.
        say: shows a line to people.

    Raises:
        InvalidArgumentError: when the address cannot be listened at.
    """
    reader = PageReader(LocalFolder(log_dir))
    feed = JobFeed(reader.read)
    try:
        server = PageServer(feed, reader.log_of, address)
    except InvalidArgumentError:
        feed.end()
        raise
    try:
        for line in reach(server):
            say(line)
        yield reader
    finally:
        feed.end(reader.last)
        server.close()
        if (log_dir / "history.jsonl").is_file():
            with contextlib.suppress(InvalidArgumentError):  # a disk that is full: the job's end counts more
                say(f"unisono: the page is in {_timeline_page.write(log_dir)[0]}")


def reach(server: PageServer) -> list[str]:
    """Return how people get to a page."""
    lines = [f"unisono: watch the job at {server.address}"]
    if server.is_local:
        host = f"{_user()}{socket.gethostname()}"
        lines.append(
            f"unisono: on another machine, `ssh -L {server.port}:{server.target} {host}`, then that address"
        )
    return lines


def _user() -> str:
    try:
        return f"{getpass.getuser()}@"
    except (KeyError, OSError):  # a container whose user has no name
        return ""


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
    with job_page(root, address, say):
        return _launch.run_program(options, program, root)


def watch_on_page(log_dir: Path, address: str, say: Callable[[str], None]) -> None:
    """Serve the page of a launch until it ends, or Ctrl-C; of one that has ended, until Ctrl-C.

    Raises:
        InvalidArgumentError: when the folder is none, or the address cannot be listened at.
    """
    if not log_dir.is_dir():
        raise InvalidArgumentError(
            f"A log folder must exist. Received: {str(log_dir)!r}. Write `unisono launch --log-dir logs …`, "
            "and then `unisono watch --web logs`."
        )
    with contextlib.suppress(KeyboardInterrupt), job_page(log_dir, address, say) as reader:
        reader.read()
        was_over = reader.is_over
        while was_over or not reader.is_over:
            time.sleep(_LOOK)
            if not was_over:
                reader.read()
