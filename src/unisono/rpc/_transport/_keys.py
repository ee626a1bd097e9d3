"""The keys of a cluster: one secret, from which each task derives all tasks' keys.

A task has two keys, one to answer and one to ask: a task with a key that a client has must not
be taken for a server. All have the secret, so that keys prove "a task of this cluster", and which one it is
as far as tasks of one cluster trust each other.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Mapping

from unisono._errors import ClusterError
from unisono.cluster_resolver._spec import ClusterSpec, Task

#: The variables that give a task the secret of its cluster: the secret itself, or a file of it.
VARIABLE = "UNISONO_CLUSTER_KEY"
FILE_VARIABLE = "UNISONO_CLUSTER_KEY_FILE"


def how_to_give_a_key(variable: str, file_variable: str) -> str:
    """Return the advice for a missing or unusable key."""
    return (
        f"Set {variable} to the same 64 hexadecimal digits in all tasks, for example those of "
        "`python -c 'import secrets; print(secrets.token_hex(32))'`, or "
        f"{file_variable} to a file of mode 0600 that holds them."
    )


HOW_TO_GIVE_A_KEY = how_to_give_a_key(VARIABLE, FILE_VARIABLE)
_PURPOSE = "unisono parameter servers, version 1"
#: The variables with the key for watching: it shows the progress of workers, and changes nothing.
WATCH_VARIABLES = ("UNISONO_WATCH_KEY", "UNISONO_WATCH_KEY_FILE")


@dataclasses.dataclass(frozen=True, repr=False)
class ClusterKeys:
    """The keys of all tasks of a cluster."""

    secret: bytes
    own: Task
    tasks: tuple[Task, ...]

    def __repr__(self) -> str:
        # Without the secret: a representation ends up in logs.
        return f"ClusterKeys(own={self.own}, {len(self.tasks)} tasks)"

    def server_secret(self, task: Task) -> bytes:
        """Return the secret key, 32 bytes, with which a task answers."""
        return self._derived("server", task)

    def client_secret(self, task: Task) -> bytes:
        """Return the secret key, 32 bytes, with which a task asks."""
        return self._derived("client", task)

    def _derived(self, side: str, task: Task) -> bytes:
        return hmac.digest(self.secret, f"{_PURPOSE}: {side} {task}".encode(), hashlib.sha256)


def new_secret() -> str:
    """Return a new secret as text.

    >>> len(new_secret())
    64
    """
    return secrets.token_hex(32)


def keys_of(secret: str, own: Task, spec: ClusterSpec, how: str = HOW_TO_GIVE_A_KEY) -> ClusterKeys:
    """Return the keys of a cluster from its secret as text.

    >>> keys_of("0f" * 32, Task("ps", 0), ClusterSpec({"ps": ["a:1"], "chief": ["b:1"]}))
    ClusterKeys(own=ps:0, 2 tasks)
    """
    if not re.fullmatch("[0-9a-fA-F]{64}", secret):
        # Not the text itself: it may be nearly right, and errors end up in logs.
        raise ClusterError(
            "The key of a cluster must be 64 hexadecimal digits. "
            f"Received: a text of {len(secret)} characters. {how}"
        )
    tasks = [Task(job, index) for job in spec.jobs for index in spec.task_indices(job)]
    if "chief" not in spec:
        # It may be a program beside the cluster.
        tasks.append(Task("chief", 0))
    return ClusterKeys(bytes.fromhex(secret), own, tuple(tasks))


def read_keys(
    environ: Mapping[str, str], own: Task, spec: ClusterSpec, variables: tuple[str, str] | None = None
) -> ClusterKeys | None:
    """Return the keys of the cluster that the environment gives, None where it gives none.

    Args:
        variables: with the secret, and with the name of its file; a cluster's by default.
    """
    variable, file_variable = variables or (VARIABLE, FILE_VARIABLE)
    how = how_to_give_a_key(variable, file_variable)
    if environ.get(variable):
        return keys_of(environ[variable].strip(), own, spec, how)
    if environ.get(file_variable):
        return keys_of(_read_secret(environ[file_variable], file_variable), own, spec, how)
    return None


def _read_secret(path: str, variable: str) -> str:
    try:
        with open(path, "rb") as file:
            # Of the open file, not of its name: that may have been replaced meanwhile.
            problem = _file_problem(os.fstat(file.fileno()))
            text = file.read(4096).decode("ascii", "replace").strip()
    # `ValueError`: Python rejects a path with a null byte.
    except (OSError, ValueError) as error:
        problem, text = getattr(error, "strerror", None) or str(error), ""
    if problem:
        raise ClusterError(
            "The key file of a cluster must be readable for its owner alone (mode 0600). "
            f"Received: {variable}={path!r}: {problem}. Write `chmod 600 {path}`."
        )
    return text


def _file_problem(state: os.stat_result) -> str | None:
    if not stat.S_ISREG(state.st_mode):
        return "it is not a file"
    if state.st_uid not in (0, os.geteuid()):
        return f"it belongs to the user {state.st_uid}"
    if state.st_mode & 0o077:
        return f"its mode is {stat.S_IMODE(state.st_mode):04o}"
    return None
