"""Estimators: TensorFlow 1's training loops around a `model_fn`, on every strategy.

Names are loaded on first use: most of them import JAX and Keras.
"""

from __future__ import annotations

import importlib
from typing import Any

from unisono import _names

#: The module of each public name.
_HOMES = {
    "_train_spec": ["EvalSpec", "TrainSpec"],
    "_train_and_evaluate": ["train_and_evaluate"],
    "canned._baseline": ["BaselineClassifier", "BaselineEstimator", "BaselineRegressor"],
    "canned._classification": ["BinaryClassHead", "MultiClassHead"],
    "canned._combined": [
        "DNNLinearCombinedClassifier", "DNNLinearCombinedEstimator", "DNNLinearCombinedRegressor",
    ],
    "canned._dnn": ["DNNClassifier", "DNNEstimator", "DNNRegressor"],
    "canned._head": ["Head"],
    "canned._linear": ["LinearClassifier", "LinearEstimator", "LinearRegressor"],
    "canned._multi_head": ["MultiHead"],
    "canned._multi_label": ["MultiLabelHead"],
    "canned._regression": ["LogisticRegressionHead", "PoissonRegressionHead", "RegressionHead"],
    "_estimator": ["Estimator"],
    "_extenders": ["add_metrics"],
    "_hparams": ["HParams"],
    "_run_config": ["DistributeConfig", "RunConfig", "TaskType"],
    "_spec": ["EstimatorSpec", "ModeKeys"],
    "_keras_model": ["model_to_estimator"],
    "_serving": [
        "ClassificationOutput", "PredictOutput", "RegressionOutput", "ServingInputReceiver",
        "TensorServingInputReceiver", "build_parsing_serving_input_receiver_fn",
        "build_raw_serving_input_receiver_fn",
    ],
    "_warm_start": ["WarmStartSettings"],
    "exporters": ["BestExporter", "Exporter", "FinalExporter", "LatestExporter"],
    "hooks._checkpoints": ["CheckpointSaverHook", "CheckpointSaverListener"],
    "hooks._hook": ["SessionRunArgs", "SessionRunContext", "SessionRunHook", "SessionRunValues"],
    "hooks._logging": ["LoggingTensorHook", "NanLossDuringTrainingError", "NanTensorHook", "StepCounterHook"],
    "hooks._stopping": ["FeedFnHook", "FinalOpsHook", "GlobalStepWaiterHook", "StopAtStepHook"],
    "hooks._summaries": ["ProfilerHook", "SummarySaverHook"],
    "hooks._timer": ["SecondOrStepTimer"],
}  # fmt: skip

_MODULES = ["exporters", "experimental", "hooks", "inputs", "layers", "losses", "metrics", "summary", "train"]

_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted([*_MODULE_OF, *_MODULES])  # noqa: PLE0605 (computed, and tested)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    module = _MODULE_OF.get(name)
    if module is None:
        raise _names.no_attribute(__name__, name, __all__)
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return __all__
