"""Which callbacks are loggers of other packages, and what keeps MLflow's `autolog` silent."""

import contextlib
import sys
import types

import keras
import pytest

from unisono.cluster.strategy import _chief_callbacks
from unisono.cluster.strategy._chief_callbacks import LOGGERS, is_chief_only, silence_autologging


def made_in(module, *bases, **attributes):
    """A callback whose class says that it is of a module, as those of installed packages do."""
    return type("Logger", bases or (keras.callbacks.Callback,), {"__module__": module, **attributes})


@pytest.mark.parametrize("package", LOGGERS)
def test_loggers_and_what_extends_them_run_on_the_chief(package):
    logger = made_in(f"{package}.integration.keras")
    assert is_chief_only(logger())
    assert is_chief_only(made_in("program", logger)())


def test_what_only_has_a_similar_name_runs_everywhere():
    assert not is_chief_only(made_in("mlflow_of_mine")())
    assert not is_chief_only(keras.callbacks.EarlyStopping())


def test_a_class_may_say_where_it_runs():
    assert is_chief_only(made_in("program", chief_only=True)())
    assert not is_chief_only(made_in("wandb.keras", chief_only=False)())
    assert not is_chief_only(made_in("program", keras.callbacks.CSVLogger, chief_only=False)("log.csv"))


def test_mlflow_stays_silent(monkeypatch, tuned):
    said = []

    @contextlib.contextmanager
    def disable_autologging():
        said.append("disabled")
        yield
        said.append("enabled")

    tuned(_chief_callbacks, _SILENCED=[])
    silence_autologging()
    assert said == []
    module = types.ModuleType("mlflow.utils.autologging_utils")
    module.disable_autologging = disable_autologging
    monkeypatch.setitem(sys.modules, module.__name__, module)
    silence_autologging()
    silence_autologging()
    assert said == ["disabled"]
