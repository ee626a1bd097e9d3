"""Processes of a launch: ports, and the process that kills orphans."""

import os
import subprocess
import sys
import time

import pytest

from unisono.launcher import _processes
from unisono.launcher._processes import OrphanReaper, Process, free_ports


def test_ports_are_free_different_and_not_those_to_avoid():
    first = free_ports(3)
    assert len(set(first)) == 3
    assert not set(first) & set(free_ports(50, avoid=first))


def test_the_guard_kills_the_groups_that_were_not_removed():
    command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    killed, removed = (subprocess.Popen(command, start_new_session=True) for _ in range(2))
    try:
        guard = OrphanReaper("no process has this mark")
        guard.add(killed.pid)
        guard.add(removed.pid)
        guard.remove(removed.pid)
        guard.close()
        assert killed.wait(timeout=60) == -9
        assert removed.poll() is None
    finally:
        for child in (killed, removed):
            child.kill()
            child.wait()


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="waitid")
def test_an_end_is_seen_before_the_thread_that_waits_for_it(tmp_path, monkeypatch):
    """The error of a task that lost this one may be there sooner, and would count as the first failure."""
    monkeypatch.setattr(Process, "_wait", lambda self: None)
    monkeypatch.setattr(_processes, "_HERE", tmp_path)
    (tmp_path / "_task.py").write_text("import sys; sys.exit(3)")
    (tmp_path / "_orphan_reaper.py").write_text("import sys; sys.stdin.read()")
    guard = OrphanReaper("no process has this mark")
    process = Process(os.environ, tmp_path / "log", guard, lambda: None)
    try:
        until = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        assert process.poll() == 3
        assert process.ended_at is not None
    finally:
        process.kill()
        guard.close()
