"""Names of `tf.data.experimental`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.data import (
    INFINITE_CARDINALITY as INFINITE_CARDINALITY,
    SHARD_HINT as SHARD_HINT,
    UNKNOWN_CARDINALITY as UNKNOWN_CARDINALITY,
)
from unisono.data.experimental import (
    AUTOTUNE as AUTOTUNE,
    AutoShardPolicy as AutoShardPolicy,
    DistributeOptions as DistributeOptions,
    assert_cardinality as assert_cardinality,
    get_single_element as get_single_element,
    group_by_window as group_by_window,
    ignore_errors as ignore_errors,
    map_and_batch as map_and_batch,
    parallel_interleave as parallel_interleave,
    prefetch_to_device as prefetch_to_device,
    rejection_resample as rejection_resample,
    scan as scan,
    shuffle_and_repeat as shuffle_and_repeat,
    take_while as take_while,
    unbatch as unbatch,
    unique as unique,
)
from unisono.tf.adapters._elements import (
    TensorDataset as _unisono_tf_adapters__elements_TensorDataset,
    cardinality as cardinality,
)
from unisono.tf.adapters.inputs._csv import (
    CsvDataset as CsvDataset,
    make_csv_dataset as make_csv_dataset,
)

Counter = _unisono_tf_adapters__elements_TensorDataset.counter
sample_from_datasets = _unisono_tf_adapters__elements_TensorDataset.sample_from_datasets
