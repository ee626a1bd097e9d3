"""Names of `tf.compat.v1.data`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.estimator.session._graph import (
    make_iterator as _unisono_estimator_session__graph_make_iterator,
)
from unisono.tf.adapters._elements import (
    get_output_classes as get_output_classes,
    get_output_shapes as get_output_shapes,
    get_output_types as get_output_types,
)
from unisono.tf.data import (
    AUTOTUNE as AUTOTUNE,
    Dataset as Dataset,
    INFINITE_CARDINALITY as INFINITE_CARDINALITY,
    Options as Options,
    TFRecordDataset as TFRecordDataset,
    TextLineDataset as TextLineDataset,
    UNKNOWN_CARDINALITY as UNKNOWN_CARDINALITY,
    experimental as experimental,
)

make_initializable_iterator = _unisono_estimator_session__graph_make_iterator
make_one_shot_iterator = _unisono_estimator_session__graph_make_iterator
