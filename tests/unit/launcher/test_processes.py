"""Processes of a launch: ports, and the process that kills orphans."""

import subprocess
import sys

from unisono.launcher._processes import OrphanReaper, free_ports


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
