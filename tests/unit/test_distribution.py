"""What a user installs: the wheel has all files of the package, no others, and works by itself."""

import subprocess
import sys
import zipfile
from pathlib import Path

import unisono

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"


def run(*command, **options):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True, text=True, timeout=300, check=False, **options,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_is_whole_and_runs(tmp_path):
    run("-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        packed = {name for name in file.namelist() if name.startswith("unisono/")}
        metadata = file.read(f"unisono-{unisono.__version__}.dist-info/METADATA").decode()
        file.extractall(tmp_path / "site")
    files = (path for path in SRC.rglob("*.*") if path.suffix != ".pyc")
    assert packed == {path.relative_to(SRC).as_posix() for path in files}
    assert f"\nVersion: {unisono.__version__}\n" in metadata
    code = (
        "import unisono; from unisono.cli import _app\n"
        "assert unisono.MirroredStrategy(['cpu:0']).num_replicas_in_sync == 1\n"
        "print(unisono.__file__)"
    )
    # In the folder, which Python looks at first.
    assert run("-c", code, cwd=tmp_path / "site").strip() == str(
        tmp_path / "site" / "unisono" / "__init__.py"
    )
