"""Names of `tf.feature_column`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.feature_column import (
    shared_embeddings as _unisono_feature_column_shared_embeddings,
    bucketized_column as bucketized_column,
    categorical_column_with_hash_bucket as categorical_column_with_hash_bucket,
    categorical_column_with_identity as categorical_column_with_identity,
    categorical_column_with_vocabulary_file as categorical_column_with_vocabulary_file,
    categorical_column_with_vocabulary_list as categorical_column_with_vocabulary_list,
    crossed_column as crossed_column,
    embedding_column as embedding_column,
    indicator_column as indicator_column,
    input_layer as input_layer,
    linear_model as linear_model,
    numeric_column as numeric_column,
    shared_embeddings as shared_embeddings,
    weighted_categorical_column as weighted_categorical_column,
)

shared_embedding_columns = _unisono_feature_column_shared_embeddings
