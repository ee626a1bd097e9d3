"""What a user installs: the wheel has all files of the package, no others, and works by itself."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

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
        packed = {name for name in file.namelist() if ".dist-info/" not in name}
        metadata = file.read(f"unisono-{unisono.__version__}.dist-info/METADATA").decode()
        file.extractall(tmp_path / "site")
    files = (path for path in SRC.rglob("*.*") if path.suffix != ".pyc")
    assert packed == {path.relative_to(SRC).as_posix() for path in files}
    assert f"\nVersion: {unisono.__version__}\n" in metadata
    check_metadata(metadata)
    code = (
        "import unisono; from unisono.cli import _app\n"
        "assert unisono.MirroredStrategy(['cpu:0']).num_replicas_in_sync == 1\n"
        "print(unisono.__file__)"
    )
    # In the folder, which Python looks at first.
    assert run("-c", code, cwd=tmp_path / "site").strip() == str(
        tmp_path / "site" / "unisono" / "__init__.py"
    )


def check_metadata(metadata):
    """What a package index shows: no link to a file that is not there, and extras for users alone."""
    head, _, description = metadata.partition("\n\n")
    assert description.startswith("# Unisono\n")
    links = re.findall(r"\]\(([^)]*)\)", description)
    assert links
    assert not [link for link in links if not link.startswith("https://")]
    extras = set(re.findall(r"^Provides-Extra: (.*)$", head, re.MULTILINE))
    assert not extras & {"bench", "demo", "dev", "docs", "gpu"}
    # With `all`, a user has every feature.
    needed = {extra: requirements(head, extra) for extra in extras}
    features = extras - {"all", "cuda12", "cuda13"}
    assert set().union(*(needed[extra] for extra in features)) == needed["all"]


def requirements(head, extra):
    """The packages that an extra needs; the builder has put theirs in place of extras that it names."""
    needed = map(Requirement, re.findall(r"^Requires-Dist: (.*)$", head, re.MULTILINE))
    of_extras = [one for one in needed if one.marker is not None and not one.marker.evaluate({"extra": ""})]
    return {one.name for one in of_extras if one.marker.evaluate({"extra": extra})}


@pytest.mark.exhaustive
def test_the_source_distribution_makes_a_wheel_that_a_clean_environment_installs(tmp_path):
    run("-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, cwd=ROOT)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        file.extractall(tmp_path, filter="data")
    unpacked = tmp_path / f"unisono-{unisono.__version__}"
    # What runs and builds leave beside the sources is not sent to others.
    left = {"run", "logs", "site", "dist", "build", ".git", ".venv"}
    assert not left & {path.name for path in unpacked.iterdir()}
    for name in ("README.md", "CHANGELOG.md", "SECURITY.md", "CITATION.cff", "LICENSE", "pyproject.toml"):
        assert (unpacked / name).read_bytes() == (ROOT / name).read_bytes()
    run("-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=unpacked)
    (wheel,) = tmp_path.glob("*.whl")
    run("-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel]
    subprocess.run(install, check=True, timeout=300)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # Its dependencies are those of this environment; a path in such a file brings no editable package.
    (packages / "dependencies.pth").write_text(str(Path(np.__file__).parents[1]))
    shown = subprocess.run(
        [tmp_path / "venv" / "bin" / "unisono", "--version"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert shown.stdout.strip() == unisono.__version__
    code = "import unisono; unisono.MirroredStrategy(['cpu:0']); print(unisono.__file__)"
    found = subprocess.run(
        [python, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True
    )
    assert found.stdout.strip() == str(packages / "unisono" / "__init__.py")


def test_the_version_stands_in_one_place():
    """The heading of the changelog names it, and no other file of the release has one of its own."""
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[0] == f"## {unisono.__version__}"
    for name in ("pyproject.toml", "CITATION.cff"):
        assert f'"{unisono.__version__}"' not in (ROOT / name).read_text()
