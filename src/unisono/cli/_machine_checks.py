"""The checks of `unisono doctor` besides JAX: packages, GPUs, memory, ports, names, keys of clouds.

Each check returns a text, or raises an error that says what to do.

Tests: tests/unit/cli/test_machine_checks.py, tests/cluster/test_launch_doctor.py.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from unisono._errors import InvalidArgumentError, MissingPackageError
from unisono.launcher._launch import visible_gpus
from unisono.launcher._processes import free_ports

#: The newest versions that `make versions` has run with.
_TESTED = {"jax": Version("0.12.0.1"), "keras": Version("3.15.1")}
#: Extras that only choose a JAX, and `all`, which names the others.
_NOT_FEATURES = ("all", "cuda12", "cuda13")
#: Docker gives a container so much of /dev/shm, unless it is told otherwise.
_LITTLE_SHARED = 64 << 20
#: The first driver that runs CUDA 13.
_CUDA_13_DRIVER = 580


def installed(name: str) -> str | None:
    """Return the version of a package, None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions(
    requires: Sequence[str] | None = None, version_of: Callable[[str], str | None] = installed
) -> str:
    """Compare the packages that are needed with the range that is supported.

    >>> versions(["jax>=0.10"], {"jax": "0.99"}.get)
    'in the supported range; newer than what was tested: jax 0.99 (0.12.0.1)'

    Raises:
        MissingPackageError: one is missing, or has another version.
    """
    newer = []
    for text in importlib.metadata.requires("unisono") or [] if requires is None else requires:
        needed = Requirement(text)
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        version = version_of(needed.name)
        if version is None or not needed.specifier.contains(version, prereleases=True):
            raise MissingPackageError(
                f"{needed.name} must be {needed.specifier or 'installed'}. Received: {version or 'none'}. "
                f"Write: pip install '{needed.name}{needed.specifier}'",
                name=needed.name,
            )
        tested = _TESTED.get(needed.name)
        if tested is not None and Version(version) > tested:
            newer.append(f"{needed.name} {version} ({tested})")
    untested = f"; newer than what was tested: {', '.join(newer)}" if newer else ""
    return f"in the supported range{untested}"


def extras() -> str:
    """Return which extras of Unisono are installed, and which are not."""
    needs: dict[str, list[Requirement]] = {}
    for name in importlib.metadata.metadata("unisono").get_all("Provides-Extra") or []:
        needs[name] = []
        for needed in map(Requirement, importlib.metadata.requires("unisono") or []):
            marker = needed.marker
            if marker is not None and not marker.evaluate({"extra": ""}) and marker.evaluate({"extra": name}):
                needs[name].append(needed)
    features = [name for name in needs if name not in _NOT_FEATURES]
    there = [name for name in features if all(installed(needed.name) for needed in needs[name])]
    missing = [name for name in features if name not in there]
    return f"{', '.join(there) or 'none'}; not installed: {', '.join(missing) or 'none'}"


def gpus(
    platform: str, environ: Mapping[str, str], devices: Path = Path("/dev"), driver: Path | None = None
) -> str:
    """Return which GPUs there are, where JAX uses them.

    Args:
        devices: the folder with the files of devices.
        driver: the file with the version of NVIDIA's driver; None for the usual one.

    Raises:
        MissingPackageError: there are some, and JAX was installed for CPUs alone.
    """
    gpus = visible_gpus(environ, devices)
    if not gpus:
        return "none (no /dev/nvidia*, or CUDA_VISIBLE_DEVICES is empty)"
    count = f"{len(gpus)} GPU{'' if len(gpus) == 1 else 's'} of NVIDIA"
    if platform == "gpu":
        return f"{count}, used by JAX"
    if environ.get("JAX_PLATFORMS", "").lower() == "cpu":
        return f"{count}, not used: JAX_PLATFORMS=cpu"
    path = driver or Path("/proc/driver/nvidia/version")
    version = re.search(r"Module\s+(?:for \S+\s+)?(\d+)\.", path.read_text()) if path.is_file() else None
    extra = "cuda12" if version is None or int(version[1]) < _CUDA_13_DRIVER else "cuda13"
    raise MissingPackageError(
        f"JAX must be installed for GPUs where it is to use them. Received: {count}, and a JAX for "
        f"{platform}. Write: pip install 'unisono[{extra}]'",
        name=f"jax[{extra}]",
    )


def shared_memory(folder: Path = Path("/dev/shm")) -> str:
    """Return how large /dev/shm is, through which tasks of one machine exchange values."""
    if not folder.is_dir():
        return f"{folder} is not there: tasks of one machine exchange values over sockets"
    state = os.statvfs(folder)
    total, free = (blocks * state.f_frsize for blocks in (state.f_blocks, state.f_bavail))
    text = f"{folder}: {free / 1e9:.3g} of {total / 1e9:.3g} GB free"
    if total <= _LITTLE_SHARED:
        raise InvalidArgumentError(
            f"{folder} must hold what tasks exchange. Received: {text}. Start the container with "
            "`docker run --shm-size=1g`, or mount an emptyDir with `medium: Memory` in Kubernetes."
        )
    return text


def ports() -> str:
    """Return that tasks find ports on this machine.

    Raises:
        ClusterError: they do not.
    """
    return f"can be bound, for example {' and '.join(map(str, free_ports(2)))}"


def host_name(
    name: str | None = None,
    resolve: Callable[[str], Sequence[str]] = lambda name: socket.gethostbyname_ex(name)[2],
) -> str:
    """Return the addresses of this host's name.

    >>> host_name("box", lambda name: ["127.0.1.1"])
    "'box' is 127.0.1.1, which other hosts cannot reach: tasks use the address of the route to the chief"
    """
    name = name or socket.gethostname()
    try:
        addresses = resolve(name)
    except OSError as error:
        return f"{name!r} is not known here ({error.strerror}): write addresses, or other names, in TF_CONFIG"
    text = f"{name!r} is {', '.join(addresses)}"
    if any(ip.startswith("127.") for ip in addresses):
        text += ", which other hosts cannot reach: tasks use the address of the route to the chief"
    return text


def cloud_keys(environ: Mapping[str, str], home: Path) -> str:
    """Return which credentials of object stores there are, and where; nothing of what is in them.

    Raises:
        InvalidArgumentError: a variable names a file that is not there.
    """
    for variable in ("GOOGLE_APPLICATION_CREDENTIALS", "AWS_SHARED_CREDENTIALS_FILE"):
        if environ.get(variable) and not Path(environ[variable]).is_file():
            raise InvalidArgumentError(f"{variable} must name a file. Received: a missing one.")
    places = {
        "gs://": (
            ["GOOGLE_APPLICATION_CREDENTIALS"],
            ".config/gcloud/application_default_credentials.json",
        ),
        "s3://": (
            ["AWS_SHARED_CREDENTIALS_FILE", "AWS_ACCESS_KEY_ID", "AWS_PROFILE"],
            ".aws/credentials",
        ),
    }
    sources = {
        scheme: [*filter(environ.get, variables), *([f"~/{path}"] if (home / path).is_file() else [])]
        for scheme, (variables, path) in places.items()
    }
    texts = [f"{scheme} {' and '.join(where) or 'none'}" for scheme, where in sources.items()]
    return "; ".join(texts) + "; a machine of a cloud may have an identity of its own"
