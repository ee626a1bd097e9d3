"""The exit code of a program, as its exit handlers see it."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys
from unisono.strategies.parameter_server._exit_code import expected_exit_code, note_exits
from unisono.strategies.parameter_server._failure import watch_program
watch_program()
note_exits()
note_exits()
atexit.register(lambda: print(expected_exit_code()))
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("sys.exit()", 0),
        ("sys.exit(3)", 3),
        ("sys.exit(-1)", 255),
        ("sys.exit('no data')", 1),
        ("raise ValueError", 1),
        ("import threading; t = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join()", 0),
    ],
)
def test_the_code_is_known_before_the_end(end, code):
    command = [sys.executable, "-c", PROGRAM + end]
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (code, f"{code}\n")
