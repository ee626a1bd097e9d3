"""The process that kills orphans."""

import os
import subprocess
import sys

import pytest

from unisono.launcher._orphan_reaper import find_marked, remaining_groups, sweep


def test_groups_that_were_removed_are_not_killed():
    assert remaining_groups(["+5", "+6", "-5", "+7"]) == {6, 7}
    assert remaining_groups([]) == set()


@pytest.mark.skipif(not os.path.exists("/proc"), reason="/proc tells of processes")
def test_marked_processes_are_found_and_killed(tmp_path):
    mark = f"unisono-test-{os.getpid()}"
    command = [sys.executable, "-S", "-c", "import time; print('ready', flush=True); time.sleep(600)"]
    environ = {**os.environ, "MARK": mark}
    children = [
        subprocess.Popen(command, env=environ, start_new_session=True, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        for child in children:
            child.stdout.readline()
        spared, killed = children
        assert find_marked(mark) == {spared.pid, killed.pid}
        sweep(mark, {spared.pid})
        assert killed.wait(timeout=60) == -9
        assert spared.poll() is None
    finally:
        for child in children:
            child.kill()
            child.wait()
            child.stdout.close()
