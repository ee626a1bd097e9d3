"""The public names of `unisono.estimator`; they are loaded when they are first used."""

from unisono.estimator import (
    experimental as experimental,
    exporters as exporters,
    hooks as hooks,
    inputs as inputs,
    layers as layers,
    losses as losses,
    metrics as metrics,
    summary as summary,
    train as train,
)
from unisono.estimator._estimator import Estimator as Estimator
from unisono.estimator._extenders import add_metrics as add_metrics
from unisono.estimator._hparams import HParams as HParams
from unisono.estimator._keras_model import model_to_estimator as model_to_estimator
from unisono.estimator._run_config import (
    DistributeConfig as DistributeConfig,
    RunConfig as RunConfig,
    TaskType as TaskType,
)
from unisono.estimator._serving import (
    ClassificationOutput as ClassificationOutput,
    PredictOutput as PredictOutput,
    RegressionOutput as RegressionOutput,
    ServingInputReceiver as ServingInputReceiver,
    TensorServingInputReceiver as TensorServingInputReceiver,
    build_parsing_serving_input_receiver_fn as build_parsing_serving_input_receiver_fn,
    build_raw_serving_input_receiver_fn as build_raw_serving_input_receiver_fn,
)
from unisono.estimator._spec import EstimatorSpec as EstimatorSpec, ModeKeys as ModeKeys
from unisono.estimator._train_and_evaluate import (
    EvalSpec as EvalSpec,
    TrainSpec as TrainSpec,
    train_and_evaluate as train_and_evaluate,
)
from unisono.estimator._warm_start import WarmStartSettings as WarmStartSettings
from unisono.estimator.canned._classification import (
    BinaryClassHead as BinaryClassHead,
    MultiClassHead as MultiClassHead,
    MultiLabelHead as MultiLabelHead,
)
from unisono.estimator.canned._estimators import (
    BaselineClassifier as BaselineClassifier,
    BaselineEstimator as BaselineEstimator,
    BaselineRegressor as BaselineRegressor,
    DNNClassifier as DNNClassifier,
    DNNEstimator as DNNEstimator,
    DNNLinearCombinedClassifier as DNNLinearCombinedClassifier,
    DNNLinearCombinedEstimator as DNNLinearCombinedEstimator,
    DNNLinearCombinedRegressor as DNNLinearCombinedRegressor,
    DNNRegressor as DNNRegressor,
    LinearClassifier as LinearClassifier,
    LinearEstimator as LinearEstimator,
    LinearRegressor as LinearRegressor,
)
from unisono.estimator.canned._head import Head as Head
from unisono.estimator.canned._multi_head import MultiHead as MultiHead
from unisono.estimator.canned._regression import (
    LogisticRegressionHead as LogisticRegressionHead,
    PoissonRegressionHead as PoissonRegressionHead,
    RegressionHead as RegressionHead,
)
from unisono.estimator.exporters import (
    BestExporter as BestExporter,
    Exporter as Exporter,
    FinalExporter as FinalExporter,
    LatestExporter as LatestExporter,
)
from unisono.estimator.hooks import (
    CheckpointSaverHook as CheckpointSaverHook,
    CheckpointSaverListener as CheckpointSaverListener,
    FeedFnHook as FeedFnHook,
    FinalOpsHook as FinalOpsHook,
    GlobalStepWaiterHook as GlobalStepWaiterHook,
    LoggingTensorHook as LoggingTensorHook,
    NanLossDuringTrainingError as NanLossDuringTrainingError,
    NanTensorHook as NanTensorHook,
    ProfilerHook as ProfilerHook,
    SecondOrStepTimer as SecondOrStepTimer,
    SessionRunArgs as SessionRunArgs,
    SessionRunContext as SessionRunContext,
    SessionRunHook as SessionRunHook,
    SessionRunValues as SessionRunValues,
    StepCounterHook as StepCounterHook,
    StopAtStepHook as StopAtStepHook,
    SummarySaverHook as SummarySaverHook,
)
