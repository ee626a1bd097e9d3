"""Runs a program with `tensorflow` provided by `unisono.tf`.

Tests: tests/unit/tf/test_run.py.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from unisono._errors import InvalidArgumentError, UnsupportedError
from unisono.tf._module import NameFinder, add_finder
from unisono.tf._table import TABLE

_USAGE = "usage: python -m unisono.tf [-m module | script.py] [arguments of the program]"


def provide_tensorflow() -> None:
    """Let `import tensorflow` find `unisono.tf` in this process.

    Raises:
        UnsupportedError: TensorFlow itself was imported before.
    """
    if "tensorflow" in sys.modules:
        raise UnsupportedError(
            "`unisono.tf` provides the module `tensorflow`. Received: a process that has imported it "
            "already. Remove the import of TensorFlow from what runs before, such as `sitecustomize`."
        )
    add_finder(NameFinder("tensorflow", TABLE, with_root=True))


def main(arguments: Sequence[str]) -> None:
    """Run a program as `__main__`.

    Args:
        arguments: the script, or `-m` and a module, and the program's own.

    Raises:
        InvalidArgumentError: there is no such script.
        SystemExit: no script was named.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        raise SystemExit(0 if arguments else 2)
    provide_tensorflow()
    if arguments[0] == "-m":
        if len(arguments) == 1:
            raise SystemExit(_USAGE)
        sys.argv = list(arguments[1:])
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    script = arguments[0]
    if not os.path.isfile(script):
        raise InvalidArgumentError(f"The first argument is a script. Received: {script!r}, which is no file.")
    sys.argv = list(arguments)
    # As `python script.py` does.
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")
