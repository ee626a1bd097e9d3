"""Optional packages, which only some features need.

Tests: tests/unit/test_extras.py.
"""

from __future__ import annotations

import importlib.util

from unisono._errors import MissingPackageError


def require_packages(what: str, extra: str, *packages: str) -> None:
    """Check that packages can be imported.

    Args:
        what: the feature that needs them, for the message.
        extra: the extra of Unisono that installs them.

    Raises:
        MissingPackageError: when one is missing; the message has the command that installs it.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise MissingPackageError(
                f"{what} needs the package `{package}`. Received: a Python without it. "
                f"Write: pip install 'unisono[{extra}]'",
                name=package,
            )
