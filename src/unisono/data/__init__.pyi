"""The public names of `unisono.data`; they are loaded when they are first used."""

from unisono.data import experimental as experimental
from unisono.data._dataset import Dataset as Dataset
from unisono.data._keras_input import as_keras_input as as_keras_input
from unisono.data._pipeline._cardinality import (
    AUTOTUNE as AUTOTUNE,
    INFINITE_CARDINALITY as INFINITE_CARDINALITY,
    SHARD_HINT as SHARD_HINT,
    UNKNOWN_CARDINALITY as UNKNOWN_CARDINALITY,
)
from unisono.data._pipeline._structure import DatasetSpec as DatasetSpec, TensorSpec as TensorSpec
from unisono.data._readers import (
    ArrayRecordDataset as ArrayRecordDataset,
    TextLineDataset as TextLineDataset,
    TFRecordDataset as TFRecordDataset,
)
from unisono.data._sharding import (
    AutoShardPolicy as AutoShardPolicy,
    DatasetCreator as DatasetCreator,
    Options as Options,
)
