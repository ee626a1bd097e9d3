"""Names of `tf.data`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.data import (
    AUTOTUNE as AUTOTUNE,
    INFINITE_CARDINALITY as INFINITE_CARDINALITY,
    Options as Options,
    UNKNOWN_CARDINALITY as UNKNOWN_CARDINALITY,
)
from unisono.estimator.session._graph import (
    make_iterator as _unisono_estimator_session__graph_make_iterator,
)
from unisono.tf.adapters._elements import (
    TFRecordDataset as TFRecordDataset,
    TextLineDataset as TextLineDataset,
    TensorDataset as _unisono_tf_adapters__elements_TensorDataset,
)
from unisono.tf.data import (
    experimental as experimental,
)

Dataset = _unisono_tf_adapters__elements_TensorDataset
make_initializable_iterator = _unisono_estimator_session__graph_make_iterator
make_one_shot_iterator = _unisono_estimator_session__graph_make_iterator
