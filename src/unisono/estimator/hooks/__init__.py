"""Hooks of `Estimator`: code that runs between the steps of its loops. Names are loaded when first used."""

from __future__ import annotations

import importlib
from typing import Any

from unisono import _names

#: Where each public name lives.
_HOMES = {
    "_checkpoints": ["CheckpointSaverHook", "CheckpointSaverListener"],
    "_early_stopping": [
        "make_early_stopping_hook", "read_eval_metrics", "stop_if_higher_hook", "stop_if_lower_hook",
        "stop_if_no_decrease_hook", "stop_if_no_increase_hook",
    ],
    "_hook": [
        "HookSession", "SessionRunArgs", "SessionRunContext", "SessionRunHook", "SessionRunValues",
    ],
    "_in_memory": ["InMemoryEvaluatorHook"],
    "_logging": ["LoggingTensorHook", "NanLossDuringTrainingError", "NanTensorHook", "StepCounterHook"],
    "_runner": ["HookRunner"],
    "_stopping": ["FeedFnHook", "FinalOpsHook", "GlobalStepWaiterHook", "StopAtStepHook"],
    "_summaries": ["ProfilerHook", "SummarySaverHook"],
    "_timer": ["NeverTriggerTimer", "SecondOrStepTimer"],
}  # fmt: skip

_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605 (computed, and tested)


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise _names.no_attribute(__name__, name, __all__)
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
