"""Names of feature columns and of canned estimators.

Tests: tests/unit/tf/test_names.py.
"""

from __future__ import annotations

from unisono.tf._entries import At, Entry, Missing, same

_SEQUENCES = (
    "sequence_categorical_column_with_hash_bucket", "sequence_categorical_column_with_identity",
    "sequence_categorical_column_with_vocabulary_file", "sequence_categorical_column_with_vocabulary_list",
    "sequence_numeric_column",
)  # fmt: skip


COLUMNS: dict[str, Entry] = {
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
