"""Callbacks that extend `fit`."""

import pytest

from unisono.callbacks import BackupAndRestore


def test_an_extension_whose_context_fit_did_not_enter_says_so(tmp_path):
    """As for one created inside of the call, in a program where Keras was not wrapped before."""
    with pytest.raises(ValueError, match="must be created before `fit` is called"):
        BackupAndRestore(tmp_path).on_train_begin()
