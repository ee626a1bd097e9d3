"""Tasks of a job compare the versions of packages."""

import pytest

from unisono import ClusterError
from unisono.rpc._versions import check_versions, installed


def test_equal_versions_and_none_at_all_are_accepted():
    assert {"unisono", "jax", "keras"} <= set(installed())
    assert set(installed("pytest")) - set(installed()) == {"pytest"}
    assert installed("no-such-package") == installed()
    check_versions(installed())
    check_versions(None)


def test_other_versions_are_named():
    own = installed()["jax"]
    words = f"jax 0.1, extra 2 on the chief, but jax {own}, extra missing on "
    with pytest.raises(ClusterError, match=words):
        check_versions(installed() | {"jax": "0.1", "extra": "2"})
