"""Clusters: the programs that tests start are no tests."""

import pytest

collect_ignore_glob = ["programs/*"]


@pytest.fixture(scope="module", autouse=True)
def patience():
    """Let tasks wait longer for each other than a minute: imports may take as long on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNISONO_START_UP", "240")
        yield
