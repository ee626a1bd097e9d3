"""A file system, or a store, of which one call fails, or all from one on: of those that concern a folder."""

import contextlib
import errno
import io
import os

import pytest

from unisono._system._object_store import StorePath

#: What `pathlib`, `shutil` and Unisono call for files and folders.
_OF_OS = (
    "open", "mkdir", "rename", "replace", "unlink", "rmdir", "scandir", "listdir", "stat", "lstat", "access",
)  # fmt: skip


class FailingCalls:
    """Counts calls that concern a folder, once `begin` was called, and lets some of them fail.

    Args:
        folder: a path of this machine or of an object store.
    """

    def __init__(self, folder):
        self._folder = str(folder)
        self._first, self._once, self._is_running = 0, True, False
        self.count = 0

    def begin(self, first=0, once=True):
        """Count from zero.

        Args:
            first: the number of the call that fails, from 1; 0 for none.
            once: whether those after it succeed again.
        """
        self._first, self._once, self._is_running, self.count = first, once, True, 0

    def end(self):
        """Let calls succeed."""
        self._is_running = False

    def note(self, path):
        """Count a call; raise if it is one of those that fail."""
        if not self._is_running or not str(path).startswith(self._folder):
            return
        self.count += 1
        if self._first and (self.count == self._first if self._once else self.count >= self._first):
            raise OSError(errno.EIO, "the token has expired", str(path))


@contextlib.contextmanager
def failing_calls(folder):
    """Yield the `FailingCalls` of a folder, for as long as the block runs."""
    calls = FailingCalls(folder)

    def failing(function):
        def call(path, *args, **options):
            calls.note(path)
            return function(path, *args, **options)

        return call

    client = StorePath._client

    def failing_client(path):
        calls.note(path)
        return client(path)

    with pytest.MonkeyPatch.context() as patches:
        for name in _OF_OS:
            patches.setattr(os, name, failing(getattr(os, name)))
        patches.setattr(io, "open", failing(io.open))
        patches.setattr(StorePath, "_client", failing_client)
        yield calls
