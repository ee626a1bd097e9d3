"""The messages between a standalone client and the servers that train for it; without sockets.

A client asks, a server answers. What is in brackets may be left out:

======  ==================================================  ==================================================
HELLO   `job`, `client`, `lease`; takes the server          `instance`, `fresh`, `taken`, `root`, `cores`,
        for the job, or finds it again                      `gpus`, `python`, `packages`
PORTS   `job`, `count`, `avoid`                             `ports`
PUT     `job`, `name`, `offset`, `size`; a blob             nothing
GET     `job`, `name`, `offset`                             `size`; a blob
START   `job`, `key`, `task`, `generation`, `shape`,        nothing
        `description`
POLL    `job`, `seen`: for each key what the client has     `now`, `news`: see `_server_job`; blobs
SIGNAL  `job`, `key`, `number`                              nothing
SWEEP   `job`                                               `killed`
END     `job`                                               nothing
STATUS  nothing                                             numbers
STATUS  `folder`: events or progress                        `files`: size and time of each
STATUS  `name`, `offset`: a file there                      a blob
======  ==================================================  ==================================================

`job` is a random text that the client chooses. All requests may arrive twice: a process has a key, and
starts once. Each request of a job renews its lease.

Tests: tests/unit/standalone/test_standalone_protocol.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from unisono._errors import InvalidArgumentError
from unisono._system._file_names import name_problem
from unisono.cluster_resolver._spec import ClusterSpec, Task
from unisono.rpc._fields import whole
from unisono.rpc._transport._keys import ClusterKeys, read_keys

#: The names by which keys are derived, which no task of a cluster has.
SERVER, CLIENT = Task("server", 0), Task("client", 0)

#: Seconds without a request of the client after which a server ends its job; and between SIGTERM and SIGKILL
#: then.
LEASE_SECONDS, LEASE_GRACE = 10.0, 3.0
#: Seconds after which a POLL is answered where there is nothing new: a client renews its lease by it.
POLL_SECONDS = 1.0
#: Seconds between two answers to POLL: a progress bar that is rewritten at each step costs one message for
#: all steps of this time.
BATCH_SECONDS = 0.05
#: Bytes of a file in one message, and of a message at most.
CHUNK, LIMIT = 4 << 20, 16 << 20
#: Characters of a client's description of itself.
_DESCRIPTION = 200


def read_standalone_keys(environ: Mapping[str, str], own: Task) -> ClusterKeys | None:
    """Return the keys of a server or a client, None without a secret.

    A server lets clients connect, and no other task: they have other keys, of the same secret.
    """
    keys = read_keys(environ, own, ClusterSpec({}))
    return None if keys is None else dataclasses.replace(keys, tasks=(CLIENT,))


def task_of(text: str) -> Task:
    """Return the task of a text such as `worker:0`.

    >>> task_of("worker:1")
    Task(type='worker', index=1)
    """
    job, _, index = text.partition(":")
    if job not in ("chief", "worker", "ps", "evaluator") or not index.isascii() or not index.isdigit():
        raise InvalidArgumentError(f"A task must be written `worker:0`. Received: {text[:100]!r}.")
    if len(index) > 6:
        raise InvalidArgumentError("The index of a task must be below a million.")
    return Task(job, int(index))


def file_name(text: str) -> str:
    """Return the name of a file below a job's directory, as it was sent.

    >>> file_name("program/train.py")
    'program/train.py'
    """
    problem = name_problem(text)
    if problem is not None:
        raise InvalidArgumentError(
            f"A file of a job must have a name below its directory. Received: {text[:100]!r}: {problem}."
        )
    return text


def printable(text: str) -> str:
    r"""Return a client's description of itself as it is shown to others.

    >>> printable("me@laptop\n\x1b[2J")
    'me@laptop??[2J'
    """
    return "".join(c if c.isprintable() else "?" for c in text[:_DESCRIPTION])


@dataclasses.dataclass(frozen=True)
class ProcessShape:
    """The facts that decide the environment of a process before it has a task.

    Args:
        tasks: how many processes of the job share the machine.
        devices: virtual CPU devices of each, None for the program's own choice.
    """

    tasks: int = 1
    devices: int | None = None
    ps: bool = False

    @classmethod
    def parse(cls, meta: Mapping[str, Any]) -> ProcessShape:
        """Return the shape of a message.

        >>> ProcessShape.parse({"tasks": 2, "devices": None, "ps": False}).tasks
        2
        """
        devices = None if meta.get("devices") is None else whole(meta, "devices", least=1, most=4096)
        return cls(whole(meta, "tasks", least=1, most=4096), devices, meta.get("ps") is True)

    @property
    def is_usual(self) -> bool:
        """True if a spare process serves: it has the whole machine."""
        return self.tasks == 1 and not self.ps and self.devices in (None, 1)
