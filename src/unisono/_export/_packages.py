"""Packages that only some formats need."""

from __future__ import annotations

import importlib.util

from unisono._errors import MissingPackageError


def require_packages(what: str, extra: str, *packages: str) -> None:
    """Raise unless all packages can be imported.

    Args:
        what: what needs them, for the message.
        extra: the extra of Unisono that installs them.
        packages: their import names.

    Raises:
        MissingPackageError: names the first that is absent and the line that installs it.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise MissingPackageError(
                f"{what} needs the package `{package}`. Received: a Python without it. "
                f"Write: pip install 'unisono[{extra}]'",
                name=package,
            )
