"""Names of `tf.config`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.tf.adapters._config import (
    LogicalDeviceConfiguration as LogicalDeviceConfiguration,
    list_physical_devices as _unisono_tf_adapters__config_list_physical_devices,
    list_logical_devices as list_logical_devices,
    list_physical_devices as list_physical_devices,
    run_functions_eagerly as run_functions_eagerly,
    set_logical_device_configuration as set_logical_device_configuration,
    set_visible_devices as set_visible_devices,
)
from unisono.tf.adapters._tensors import (
    no_op as _unisono_tf_adapters__tensors_no_op,
)
from unisono.tf.config import (
    experimental as experimental,
    optimizer as optimizer,
    threading as threading,
)
from unisono.tpu import (
    experimental_connect_to_cluster as experimental_connect_to_cluster,
)

get_visible_devices = _unisono_tf_adapters__config_list_physical_devices
set_soft_device_placement = _unisono_tf_adapters__tensors_no_op
