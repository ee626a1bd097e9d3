"""Tests of this folder are skipped, with a reason, where the platform is not there or was not asked for."""

import os

import jax
import pytest

from tests.support import PLATFORM

collect_ignore_glob = ["programs/*"]


def why_not():
    """Why these tests cannot run here; None where they can."""
    if "UNISONO_TEST_PLATFORM" not in os.environ:
        return "needs NVIDIA GPUs: run `make gpu`, or `make gpu-stand-in` for the same tests on CPU devices"
    try:
        jax.local_devices(backend=PLATFORM)
    except RuntimeError as error:
        return f"JAX has no devices of UNISONO_TEST_PLATFORM={PLATFORM}: {error}"
    return None


# Of the session, so that it comes before fixtures that make strategies.
@pytest.fixture(scope="session", autouse=True)
def platform():
    if reason := why_not():
        pytest.skip(reason)
    return PLATFORM
