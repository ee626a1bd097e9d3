"""Install Unisono with each extra alone in an environment of its own, and open its doors there.

    python tools/extras.py               # with the required packages alone, and with each extra
    python tools/extras.py none cluster  # some of them

`tests/unit/test_extras.py` does the same with links to the packages of one environment, in seconds.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests import few_packages  # noqa: E402

#: What the command line calls the required packages.
NONE = "none"


def wrong_doors(extra: str) -> set[str]:
    """Return what `tests/doors.py` says of names in a new environment that should not need an extra there."""
    with tempfile.TemporaryDirectory() as folder:
        python = f"{folder}/venv/bin/python"
        run(folder, sys.executable, "-m", "venv", "venv")
        run(
            folder,
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            str(ROOT) if extra == NONE else f"{ROOT}[{extra}]",
        )
        printed = run(folder, python, "-I", ROOT / "tests" / "doors.py")
    return set(printed.splitlines()) - few_packages.closed_doors([] if extra == NONE else [extra])


def run(folder: str, *command: str | Path) -> str:
    """Run a command in a folder, and return what it prints; of one that fails, its errors are printed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
    done.check_returncode()
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "extras", nargs="*", metavar="EXTRA", help="all of them by default; `none` is without any"
    )
    failed = 0
    for extra in parser.parse_args().extras or [NONE, *few_packages.features()]:
        begin = time.monotonic()
        try:
            wrong = sorted(wrong_doors(extra))
        except subprocess.CalledProcessError as error:
            wrong = [str(error)]
        failed += bool(wrong)
        print(f"{extra}: {', '.join(wrong) or 'right'} ({time.monotonic() - begin:.0f} s)", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
