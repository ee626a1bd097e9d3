"""Names of the Estimator, of feature columns, and of what model functions of TensorFlow 1 are made of.

Tests: tests/unit/tf/test_names.py, tests/unit/tf/test_estimator_names.py.
"""

from __future__ import annotations

from unisono.tf._entries import At, Entry, Missing, Value, own, same

_ERRORS = "mean_absolute_error mean_squared_error"
_SEQUENCES = (
    "sequence_categorical_column_with_hash_bucket", "sequence_categorical_column_with_identity",
    "sequence_categorical_column_with_vocabulary_file", "sequence_categorical_column_with_vocabulary_list",
    "sequence_numeric_column",
)  # fmt: skip
_SIGNATURES = {
    "CLASSIFY_METHOD_NAME": "tensorflow/serving/classify",
    "DEFAULT_SERVING_SIGNATURE_DEF_KEY": "serving_default",
    "PREDICT_METHOD_NAME": "tensorflow/serving/predict",
    "REGRESS_METHOD_NAME": "tensorflow/serving/regress",
}

_BOTH = "with `labels=` or in a model_fn TensorFlow 1's, else Keras'"
_SUMMARY = "in a model_fn and without a step TensorFlow 1's, else TensorFlow 2's"


def _graph(name: str, note: str = "") -> At:
    """Return the entry of a function of TensorFlow 1's graphs."""
    return At(f"unisono.estimator.session._graph.{name}", note)


ESTIMATOR: dict[str, Entry] = {
    **same(
        "estimator.", "unisono.estimator.",
        "BestExporter CheckpointSaverHook CheckpointSaverListener Estimator EstimatorSpec EvalSpec "
        "Exporter FeedFnHook FinalExporter FinalOpsHook GlobalStepWaiterHook LatestExporter "
        "LoggingTensorHook ModeKeys NanLossDuringTrainingError NanTensorHook ProfilerHook RunConfig "
        "SecondOrStepTimer SessionRunArgs SessionRunContext SessionRunHook SessionRunValues "
        "StepCounterHook StopAtStepHook SummarySaverHook TrainSpec WarmStartSettings add_metrics "
        "model_to_estimator train_and_evaluate",
    ),
    "keras.estimator.model_to_estimator": At("unisono.estimator.model_to_estimator"),
    **same(
        "estimator.export.", "unisono.estimator.",
        "ClassificationOutput PredictOutput RegressionOutput ServingInputReceiver "
        "TensorServingInputReceiver build_parsing_serving_input_receiver_fn "
        "build_raw_serving_input_receiver_fn",
    ),
    **same(
        "estimator.experimental.", "unisono.estimator.experimental.",
        "InMemoryEvaluatorHook make_early_stopping_hook stop_if_higher_hook stop_if_lower_hook "
        "stop_if_no_decrease_hook stop_if_no_increase_hook",
    ),
    **same("estimator.inputs.", "unisono.estimator.inputs.", "numpy_input_fn pandas_input_fn"),
    "estimator.tpu": Missing("is gone", "`tf.distribute.TPUStrategy` as `RunConfig(train_distribute=…)`"),
    **same(
        "layers.", "unisono.estimator.layers.",
        "AveragePooling1D AveragePooling2D AveragePooling3D BatchNormalization Conv1D Conv2D "
        "Conv2DTranspose Conv3D Conv3DTranspose Dense Dropout Flatten MaxPooling1D MaxPooling2D "
        "MaxPooling3D SeparableConv1D SeparableConv2D average_pooling1d average_pooling2d "
        "average_pooling3d batch_normalization conv1d conv2d conv2d_transpose conv3d conv3d_transpose "
        "dense dropout flatten max_pooling1d max_pooling2d max_pooling3d separable_conv1d "
        "separable_conv2d",
    ),
    **same(
        "losses.", "unisono.estimator.losses.",
        "absolute_difference add_loss compute_weighted_loss cosine_distance get_losses "
        "get_regularization_loss get_regularization_losses get_total_loss hinge_loss huber_loss log_loss "
        "mean_pairwise_squared_error sigmoid_cross_entropy softmax_cross_entropy "
        "sparse_softmax_cross_entropy",
    ),
    "losses.Reduction": own("_estimator.LossReduction"),
    "losses.mean_squared_error": own("_estimator.mean_squared_error_loss", _BOTH),
    "compat.v1.losses.mean_squared_error": At("unisono.estimator.losses.mean_squared_error"),
    **same(
        "metrics.", "unisono.estimator.metrics.",
        "accuracy auc average_precision_at_k false_negatives false_negatives_at_thresholds "
        "false_positives false_positives_at_thresholds mean mean_cosine_distance mean_iou "
        "mean_per_class_accuracy mean_relative_error mean_tensor percentage_below precision "
        "precision_at_k precision_at_thresholds precision_at_top_k recall recall_at_k "
        "recall_at_thresholds recall_at_top_k root_mean_squared_error sensitivity_at_specificity "
        "sparse_average_precision_at_k sparse_precision_at_k specificity_at_sensitivity true_negatives "
        "true_negatives_at_thresholds true_positives true_positives_at_thresholds",
    ),
    **same("metrics.", "_estimator.", _ERRORS, lambda path: own(path, _BOTH)),
    **same("compat.v1.metrics.", "unisono.estimator.metrics.", _ERRORS),
    **same(
        "train.", "unisono.estimator.train.",
        "AdadeltaOptimizer AdagradOptimizer AdamOptimizer CheckpointSaverHook CheckpointSaverListener "
        "FeedFnHook FinalOpsHook FtrlOptimizer GlobalStepWaiterHook GradientDescentOptimizer "
        "LoggingTensorHook MomentumOptimizer NanLossDuringTrainingError NanTensorHook Optimizer "
        "ProfilerHook ProximalAdagradOptimizer ProximalGradientDescentOptimizer RMSPropOptimizer "
        "SecondOrStepTimer SessionRunArgs SessionRunContext SessionRunHook SessionRunValues "
        "StepCounterHook StopAtStepHook ExponentialMovingAverage Saver Scaffold SummarySaverHook "
        "SyncReplicasOptimizer cosine_decay cosine_decay_restarts create_global_step exponential_decay "
        "get_global_step get_or_create_global_step global_step init_from_checkpoint inverse_time_decay "
        "linear_cosine_decay natural_exp_decay piecewise_constant piecewise_constant_decay "
        "polynomial_decay",
    ),
    "contrib.training.HParams": At("unisono.estimator.HParams"),
    **{
        f"{module}.make_{name}_iterator": _graph("make_iterator")
        for module in ("compat.v1.data", "data")
        for name in ("initializable", "one_shot")
    },
    "placeholder": own("_estimator.placeholder", "describes an input of an exported model; nothing is fed"),
    **{
        name: _graph("initializer", "in a model_fn, where nothing is left to initialize")
        for name in (
            "global_variables_initializer", "initialize_all_variables", "local_variables_initializer",
            "tables_initializer", "variables_initializer",
        )
    },
    **{
        f"saved_model.{prefix}{name}": Value(value, repr(value))
        for prefix in ("", "signature_constants.")
        for name, value in _SIGNATURES.items()
    },
    "train.AdagradDAOptimizer": Missing("has no counterpart", "`tf.train.FtrlOptimizer`"),
    "train.noisy_linear_cosine_decay": Missing("has no counterpart", "`tf.train.linear_cosine_decay`"),
    **same("summary.", "_estimator.", "histogram image scalar text", lambda path: own(path, _SUMMARY)),
    **same("summary.", "unisono.estimator.summary.", "merge merge_all"),
    **same(
        "", "unisono.estimator.layers.",
        "AUTO_REUSE VariableScope get_variable get_variable_scope variable_scope",
    ),
    **same(
        "", "",
        "GraphKeys add_to_collection get_collection global_variables gradients trainable_variables",
        lambda name: _graph(name, "in a model_fn"),
    ),
    **same("", "", "assign assign_add assign_sub group identity no_op", _graph),
    **same(
        "estimator.", "unisono.estimator.",
        "BaselineClassifier BaselineEstimator BaselineRegressor BinaryClassHead DNNClassifier "
        "DNNEstimator DNNLinearCombinedClassifier DNNLinearCombinedEstimator DNNLinearCombinedRegressor "
        "DNNRegressor Head LinearClassifier LinearEstimator LinearRegressor LogisticRegressionHead "
        "MultiClassHead MultiHead MultiLabelHead PoissonRegressionHead RegressionHead",
    ),
    **{
        f"estimator.{name}": Missing("is not among the canned estimators here", instead)
        for name, instead in {
            "BoostedTreesClassifier": "`DNNClassifier`, or scikit-learn's `HistGradientBoostingClassifier`",
            "BoostedTreesRegressor": "`DNNRegressor`, or scikit-learn's `HistGradientBoostingRegressor`",
        }.items()
    },
    **same(
        "feature_column.", "unisono.feature_column.",
        "bucketized_column categorical_column_with_hash_bucket categorical_column_with_identity "
        "categorical_column_with_vocabulary_file categorical_column_with_vocabulary_list crossed_column "
        "embedding_column indicator_column numeric_column shared_embeddings weighted_categorical_column "
        "input_layer linear_model",
    ),
    "feature_column.shared_embedding_columns": At("unisono.feature_column.shared_embeddings"),
    **{
        f"feature_column.{name}": Missing(
            "is not among the feature columns here", "`keras.layers.Embedding` and a recurrent layer"
        )
        for name in _SEQUENCES
    },
    "feature_column.make_parse_example_spec": Missing(
        "describes TensorFlow's records, which are not parsed here",
        "a function that returns a dict of arrays, for `Dataset.map`",
    ),
    "keras.layers.DenseFeatures": At(
        "unisono.feature_column.DenseFeatures", note="strings need `dataset.map(layer.encode)` first"
    ),
}  # fmt: skip
