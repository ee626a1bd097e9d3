"""What describes a cluster: `unisono.cluster_resolver`. Names are loaded when they are first used."""

from __future__ import annotations

import importlib
from typing import Any

from unisono._names import no_attribute
from unisono.cluster_resolver._registry import DETECTED, ON_REQUEST

#: Where the public names live that are not resolvers.
_OTHERS = {
    "ClusterResolver": "_base",
    "ClusterSpec": "_spec",
    "KubernetesExecutableLocation": "_kubernetes",
    "Timeouts": "_spec",
    "resolve": "_detect",
}

__all__ = sorted([*DETECTED, *ON_REQUEST, *_OTHERS])  # noqa: PLE0605 (computed, and tested)


def __getattr__(name: str) -> Any:
    module = DETECTED.get(name) or ON_REQUEST.get(name) or _OTHERS.get(name)
    if module is None:
        raise no_attribute(__name__, name, __all__)
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
