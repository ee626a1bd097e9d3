"""The versions of packages that tasks of one job compare."""

from __future__ import annotations

import socket
from importlib import metadata

from unisono._errors import ClusterError

#: Between whose versions results, formats and messages may change.
PACKAGES = ("jax", "jaxlib", "keras", "numpy", "unisono")


def installed(*more: str) -> dict[str, str]:
    """Return the versions of those packages, and of some more, that are installed."""
    versions = {}
    for name in (*PACKAGES, *more):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def check_versions(of_chief: object) -> None:
    """Check that this task has the versions that its chief sends."""
    if not isinstance(of_chief, dict):
        return
    own = installed()
    others = {name: version for name, version in of_chief.items() if own.get(name) != version}
    if others:
        theirs = ", ".join(f"{name} {version}" for name, version in others.items())
        ours = ", ".join(f"{name} {own.get(name, 'missing')}" for name in others)
        raise ClusterError(
            "All tasks of a cluster must have the same versions of packages. Received: "
            f"{theirs} on the chief, but {ours} on {socket.gethostname()}. Install one version everywhere."
        )
