"""Names of `tf.config.experimental`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.tf.adapters._config import (
    LogicalDeviceConfiguration as _unisono_tf_adapters__config_LogicalDeviceConfiguration,
    set_logical_device_configuration as _unisono_tf_adapters__config_set_logical_device_configuration,
    list_logical_devices as list_logical_devices,
    list_physical_devices as list_physical_devices,
    set_memory_growth as set_memory_growth,
    set_visible_devices as set_visible_devices,
)
from unisono.tf.adapters._tensors import (
    no_op as _unisono_tf_adapters__tensors_no_op,
)

VirtualDeviceConfiguration = _unisono_tf_adapters__config_LogicalDeviceConfiguration
enable_op_determinism = _unisono_tf_adapters__tensors_no_op
set_virtual_device_configuration = _unisono_tf_adapters__config_set_logical_device_configuration
