"""Names of `tf.keras.distribution` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.distribution import (
    DataParallel as DataParallel,
    DeviceMesh as DeviceMesh,
    LayoutMap as LayoutMap,
    ModelParallel as ModelParallel,
    TensorLayout as TensorLayout,
    distribute_tensor as distribute_tensor,
    distribution as distribution,
    get_device_count as get_device_count,
    initialize as initialize,
    list_devices as list_devices,
    set_distribution as set_distribution,
)
