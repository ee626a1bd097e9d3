"""Optimizers, learning rates and hooks with TensorFlow 1's names: `tf.train`.

Source: https://www.tensorflow.org/versions/r1.15/api_docs/python/tf/train
"""

from __future__ import annotations

import importlib
from typing import Any

from unisono._names import no_attribute

#: Where each public name lives, below `unisono.estimator`.
_HOMES = {
    "train._optimizers": [
        "AdadeltaOptimizer", "AdagradOptimizer", "AdamOptimizer", "FtrlOptimizer",
        "GradientDescentOptimizer", "MomentumOptimizer", "Optimizer", "ProximalAdagradOptimizer",
        "ProximalGradientDescentOptimizer", "RMSPropOptimizer", "SyncReplicasOptimizer",
    ],
    "train._averages": ["ExponentialMovingAverage"],
    "train._scaffold": ["Saver", "Scaffold", "init_from_checkpoint"],
    "train._decay": [
        "cosine_decay", "cosine_decay_restarts", "exponential_decay", "inverse_time_decay",
        "linear_cosine_decay", "natural_exp_decay", "piecewise_constant", "polynomial_decay",
    ],
    "train._steps": [
        "create_global_step", "get_global_step", "get_or_create_global_step", "global_step",
    ],
    "hooks._checkpoints": ["CheckpointSaverHook", "CheckpointSaverListener"],
    "hooks._hook": ["SessionRunArgs", "SessionRunContext", "SessionRunHook", "SessionRunValues"],
    "hooks._logging": ["LoggingTensorHook", "NanLossDuringTrainingError", "NanTensorHook", "StepCounterHook"],
    "hooks._stopping": ["FeedFnHook", "FinalOpsHook", "GlobalStepWaiterHook", "StopAtStepHook"],
    "hooks._summaries": ["ProfilerHook", "SummarySaverHook"],
    "hooks._timer": ["SecondOrStepTimer"],
}  # fmt: skip

_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted([*_MODULE_OF, "piecewise_constant_decay"])  # noqa: PLE0605 (computed, and tested)


def __getattr__(name: str) -> Any:
    own = "piecewise_constant" if name == "piecewise_constant_decay" else name
    module = _MODULE_OF.get(own)
    if module is None:
        raise no_attribute(__name__, name, __all__)
    return getattr(importlib.import_module(f"unisono.estimator.{module}"), own)


def __dir__() -> list[str]:
    return __all__
