"""Environments with the required packages of Unisono, and those of some extras, made within a second.

A folder has links to the packages of this environment that pyproject.toml asks for, and to theirs;
a Python that looks there alone (`-S`) has no others.
"""

import collections
import functools
import importlib.metadata
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


#: Extras that only choose a JAX, and `all`, which names the others.
NOT_FEATURES = {"all", "cuda12", "cuda13"}
#: What `tests/doors.py` says of names that need an extra.
NEEDS = {
    "cluster": {
        "unisono.ParameterServerStrategy", "unisono.Server", "unisono.run_standard_server",
        "unisono.coordinator.ClusterCoordinator", "unisono.coordinator.PerWorkerValue",
        "unisono.coordinator.PerWorkerValues", "unisono.coordinator.RemoteValue",
        "unisono.coordinator.experimental_get_current_worker_index",
        "unisono.coordinator.get_current_worker_index",
        "unisono.experimental.ParameterServerStrategy", "unisono.standalone.StandardServer",
        "unisono.standalone.run_on_cluster", "unisono.standalone.run_standard_server",
    },
    "export": {"saved"},
}  # fmt: skip


def features():
    """The extras that users choose."""
    return sorted(PROJECT["optional-dependencies"].keys() - NOT_FEATURES)


def closed_doors(extras=()):
    """What `tests/doors.py` prints with the packages of some extras."""
    names = {canonicalize_name(needed.name) for needed in requirements(extras)}
    return {
        f"{door} {extra}"
        for extra, doors in NEEDS.items()
        if not {canonicalize_name(needed.name) for needed in requirements([extra])} <= names
        for door in doors
    }


def requirements(extras=()):
    """What pyproject.toml asks for, with extras that others name."""
    found = [Requirement(text) for text in PROJECT["dependencies"]]
    for extra in extras:
        for needed in map(Requirement, PROJECT["optional-dependencies"][extra]):
            found += requirements(needed.extras) if needed.name == "unisono" else [needed]
    return found


def packages(extras=(), more=()):
    """The names of the packages that Unisono with some extras has, as far as they are installed here."""
    waiting, seen = [*requirements(extras), *map(Requirement, more)], set()
    while waiting:
        needed = waiting.pop()
        name = canonicalize_name(needed.name)
        for extra in {"", *needed.extras}:
            if needed.marker is not None and not needed.marker.evaluate():
                continue
            if (name, extra) in seen or not is_installed(name):
                continue
            seen.add((name, extra))
            for text in importlib.metadata.requires(name) or ():
                below = Requirement(text)
                if below.marker is None or below.marker.evaluate({"extra": extra}):
                    below.marker = None
                    waiting.append(below)
    return {name for name, _ in seen}


def is_installed(name):
    return any(importlib.metadata.distributions(name=name))


def is_complete(extra):
    """True if all that an extra asks for is installed here."""
    return all(is_installed(needed.name) for needed in requirements([extra]))


@functools.cache
def owned():
    """From each path of one or two parts to the packages that have files there, and to where it is."""
    owners, places = collections.defaultdict(set), {}
    # Ray, where it is imported, adds a folder of its own to `sys.path`, with other copies of some packages.
    for distribution in importlib.metadata.distributions(path=[sysconfig.get_path("purelib")]):
        name = canonicalize_name(distribution.name)
        # Lines of a path, its hash and its size; `distribution.files` takes seconds.
        record = (distribution.read_text("RECORD") or "").splitlines()
        for parts in {tuple(line.split(",")[0].split("/")[:2]) for line in record}:
            for path in ("/".join(parts[:count]) for count in range(1, len(parts) + 1)):
                owners[path].add(name)
                places[path] = distribution.locate_file(path)
    return owners, places


def linked(folder, extras=(), more=()):
    """Make a folder with links to the packages of Unisono with some extras, and to Unisono; return it.

    Args:
        more: requirements besides those of Unisono.
    """
    wanted = packages(extras, more)
    owners, places = owned()
    folder.mkdir()
    for path in sorted(owners):
        link = folder / path
        if path.startswith(("..", "__pycache__")) or link.exists() or not owners[path] & wanted:
            continue
        if owners[path] <= wanted:
            link.symlink_to(places[path])
        else:  # such as `google`, below which several packages have folders
            link.mkdir()
    (folder / "unisono").symlink_to(ROOT / "src" / "unisono")
    return folder


def run(folder, *command, timeout=300):
    """Run Python with the packages of a folder alone, in that folder's parent; return what it prints."""
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder), "HOME": str(folder.parent)}
    done = subprocess.run(
        [sys.executable, "-S", *map(str, command)],
        capture_output=True, text=True, timeout=timeout, check=False, env=environ, cwd=folder.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
