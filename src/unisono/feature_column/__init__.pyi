"""The public names of `unisono.feature_column`; they are loaded when they are first used."""

from unisono.feature_column._categorical import (
    categorical_column_with_hash_bucket as categorical_column_with_hash_bucket,
    categorical_column_with_identity as categorical_column_with_identity,
    categorical_column_with_vocabulary_file as categorical_column_with_vocabulary_file,
    categorical_column_with_vocabulary_list as categorical_column_with_vocabulary_list,
    crossed_column as crossed_column,
    weighted_categorical_column as weighted_categorical_column,
)
from unisono.feature_column._dense import (
    embedding_column as embedding_column,
    indicator_column as indicator_column,
    shared_embeddings as shared_embeddings,
)
from unisono.feature_column._encode import encode as encode
from unisono.feature_column._models import (
    DenseFeatures as DenseFeatures,
    LinearModel as LinearModel,
    input_layer as input_layer,
    linear_model as linear_model,
)
from unisono.feature_column._numeric import (
    bucketized_column as bucketized_column,
    numeric_column as numeric_column,
)
