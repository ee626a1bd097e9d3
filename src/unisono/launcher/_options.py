"""The options of a launch: one frozen record, validated on construction; pure.

Tests: tests/unit/launcher/test_launch_options.py.
"""

from __future__ import annotations

import dataclasses
import re
import shlex

from unisono._errors import InvalidArgumentError

#: Restarts where `--elastic` or `--ps` is given and `--max-restarts` is not. Elastic launches run where
#: machines are taken away as a matter of course, and with parameter servers the others go on while one task
#: starts again; the limit is there to stop a program that fails at each start.
_DEFAULT_RESTARTS = 10


@dataclasses.dataclass(frozen=True)
class UserProgram:
    """The program of each task.

    Args:
        target: the path of a script, or the name of a module.
        args: the program's `sys.argv[1:]`.
        is_module: whether `target` is the name of a module.
        is_call: whether `target` is a file with a pickled function, see `_function_call.write_call`.

    >>> UserProgram("train.py", ("--lr", "0.1")).text
    'train.py --lr 0.1'
    """

    target: str
    args: tuple[str, ...] = ()
    is_module: bool = False
    is_call: bool = False

    @property
    def text(self) -> str:
        """The program as it is written after `python`, and for a call after `unisono run`."""
        kind = ["-m"] * self.is_module + ["--call"] * self.is_call
        return shlex.join([*kind, self.target, *self.args])


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """How many tasks run, with which devices, and what happens when one fails.

    Args:
        workers: the number of tasks of the job `worker`.
        ps: the number of tasks of the job `ps`.
        chief: whether there is a task of the job `chief`.
        devices_per_worker: the number of virtual CPU devices of each computing task; None leaves it to the
            program.
        max_restarts: restarts after failures within `window`; None means 0, or 10 with `elastic` or `ps`.
        spares: the number of warm standby processes; None means one per task where restarts are allowed, with
            `ps` one in all where `max_restarts` is given.
        elastic: the fewest and the most workers; None means always `workers`.
        grace: seconds between SIGTERM and SIGKILL.
        stall_timeout: seconds without progress after which a task has failed; 0 disables the limit.
        window: the sliding window, in seconds, in which restarts and failures are counted.
        cool_down: seconds that a generation runs before it is resized.
        interface: over which the workers connect, see `CommunicationOptions`; None leaves it to the program.

    Raises:
        InvalidArgumentError: when a number is out of range; the message names the flag.

    >>> LaunchOptions(workers=4, max_restarts=1).spare_count(4), LaunchOptions(workers=4).spare_count(4)
    (4, 0)
    """

    workers: int = 1
    ps: int = 0
    chief: bool = False
    evaluator: bool = False
    devices_per_worker: int | None = None
    max_restarts: int | None = None
    spares: int | None = None
    elastic: tuple[int, int] | None = None
    grace: float = 30.0
    stall_timeout: float = 300.0
    window: float = 600.0
    cool_down: float = 60.0
    interface: str | None = None

    def __post_init__(self) -> None:
        # A chief alone is a cluster of an Estimator.
        for name, least in (
            ("workers", 0 if self.chief else 1),
            ("ps", 0),
            ("devices_per_worker", 1),
            ("max_restarts", 0),
        ):
            _check_at_least(name, getattr(self, name), least)
        _check_at_least("spares", self.spares, 0)
        for name in ("grace", "stall_timeout", "window", "cool_down"):
            _check_at_least(name, getattr(self, name), 0)
        if self.elastic is not None:
            _check_elastic(self.elastic, self.workers)

    @property
    def restarts(self) -> int:
        """The number of restarts after failures that are allowed within the window."""
        if self.max_restarts is not None:
            return self.max_restarts
        return _DEFAULT_RESTARTS if self.elastic or self.ps else 0

    @property
    def restarts_tasks(self) -> bool:
        """True if a failed task starts again while the others go on: with parameter servers."""
        return self.ps > 0 and self.elastic is None and self.restarts > 0

    @property
    def worker_range(self) -> tuple[int, int]:
        """The fewest and the most workers of a generation."""
        return self.elastic or (self.workers, self.workers)

    def spare_count(self, tasks: int) -> int:
        """Return the number of warm standby processes while `tasks` tasks run."""
        if self.spares is not None:
            return self.spares
        if self.restarts_tasks:
            return 0 if self.max_restarts is None else 1
        return tasks if self.restarts else 0


def _check_at_least(name: str, value: float | None, least: int) -> None:
    # Not `value < least`, which is false for NaN.
    if value is not None and not least <= value < float("inf"):
        flag = "-n" if name == "workers" else "--" + name.replace("_", "-")
        raise InvalidArgumentError(
            f"`{flag}` must be at least {least}. Received: {name}={value!r}. Write `{flag} {max(least, 1)}`."
        )


def _check_elastic(elastic: tuple[int, int], workers: int) -> None:
    least, most = elastic
    if not 1 <= least <= most:
        raise InvalidArgumentError(
            "`--elastic` must be the fewest and the most workers, at least 1. "
            f"Received: {least}:{most}. Write `--elastic 2:4`."
        )
    if workers != most:
        raise InvalidArgumentError(
            "An elastic launch must start with the most workers. "
            f"Received: workers={workers}, elastic={least}:{most}. Leave `-n` out, or write `-n {most}`."
        )


def parse_elastic(text: str) -> tuple[int, int]:
    """Return the fewest and the most workers from `"2:4"`.

    >>> parse_elastic("2:4")
    (2, 4)
    """
    match = re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6})", text)
    if match is None:
        raise InvalidArgumentError(
            f"`--elastic` must be two numbers, MIN:MAX. Received: {text!r}. Write `--elastic 2:4`."
        )
    return int(match.group(1)), int(match.group(2))


def parse_spares(text: str) -> int | None:
    """Return the number of spares in a text, or None for `"auto"`.

    >>> parse_spares("auto"), parse_spares("2")
    (None, 2)
    """
    if text == "auto":
        return None
    if not re.fullmatch(r"[0-9]{1,6}", text):
        raise InvalidArgumentError(
            f"`--spares` must be a number or 'auto'. Received: {text!r}. Write `--spares auto`."
        )
    return int(text)
