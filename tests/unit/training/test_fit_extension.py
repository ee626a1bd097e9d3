"""Callbacks that take part in `fit`."""

import pytest

from unisono.callbacks import BackupAndRestore


def test_a_companion_that_fit_did_not_ask_says_so(tmp_path):
    """As happens to one made inside of the call, in a program that has wrapped nothing before."""
    with pytest.raises(ValueError, match="must be created before `fit` is called"):
        BackupAndRestore(tmp_path).on_train_begin()
