"""Folders of function calls: who removes them, and when."""

import os
import subprocess
import sys

from unisono.launcher._function_call import CALL_PREFIX, call_folder

KILLED = """
import os, signal, sys
from pathlib import Path
from unisono.launcher._function_call import call_folder
with call_folder(Path(sys.argv[1])) as root:
    (root / "large").write_text("x")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_call_removes_what_a_killed_process_has_left(tmp_path):
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False).returncode == -9
    (left,) = tmp_path.iterdir()
    # An id that lives by now: another process has it.
    (left / "owner").write_text(str(os.getppid()))
    with call_folder(tmp_path) as own:
        assert list(tmp_path.iterdir()) == [own]
    assert list(tmp_path.iterdir()) == []


def test_folders_in_use_and_those_of_others_stay(tmp_path):
    beginning, strange = tmp_path / f"{CALL_PREFIX}1", tmp_path / f"{CALL_PREFIX}2"
    beginning.mkdir()
    # Its process has not locked it yet.
    (beginning / "owner").touch()
    strange.write_text("no folder")
    with call_folder(tmp_path) as first, call_folder(tmp_path) as second:
        assert set(tmp_path.iterdir()) == {beginning, strange, first, second}
    assert set(tmp_path.iterdir()) == {beginning, strange}
