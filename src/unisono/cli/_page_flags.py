"""The flags of the page of a job, which `unisono launch` and `unisono watch` have.

Tests: tests/unit/watch/test_job_page.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unisono._errors import InvalidArgumentError

Web = Annotated[bool, typer.Option("--web", help="Serve the job as a page for a browser, until it ends.")]
WebAddress = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="With --web: where. [default: 127.0.0.1 and a free port]"),
]

WatchKey = Annotated[
    Path | None,
    typer.Option(
        "--key",
        metavar="FILE",
        help="The key of the workers or servers at HOST:PORT.",
    ),
]


def page_address(web: bool, address: str | None, is_elsewhere: bool = False) -> str | None:
    """Return the address of the page's server; None without a page.

    Args:
        is_elsewhere: whether the launch is not one of this machine.

    Raises:
        InvalidArgumentError: when the flags contradict each other.
    """
    if web and is_elsewhere:
        raise InvalidArgumentError(
            "`--web` shows a launch on this machine. Received: --cluster, --on or --dry-run, too. Write "
            "`unisono watch --web LOGDIR` where the log folder of the job is."
        )
    if address is not None and not web:
        raise InvalidArgumentError(
            f"`--web-address` belongs to `--web`. Received: {address!r} without it. Write "
            f"`--web --web-address {address}`."
        )
    return (address or "127.0.0.1:0") if web else None


def say(line: str) -> None:
    """Show a line to people, beside the output of a program."""
    typer.echo(line, err=True)
