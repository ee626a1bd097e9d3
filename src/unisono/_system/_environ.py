"""The environment variables of this process, for modules that are no door to them.

Tests: tests/unit/cluster_resolver/test_base.py.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping


def process_environ() -> MutableMapping[str, str]:
    """Return the environment of this process.

    >>> import os
    >>> process_environ() is os.environ
    True
    """
    return os.environ
