"""The public names of `unisono.spi`; they are loaded when they are first used."""

from unisono._lowering._compiler_options import Executables as Executables
from unisono._mesh import ReplicaMesh as ReplicaMesh, resolve_devices as resolve_devices
from unisono.checkpoint._markers import TrainingEnd as TrainingEnd
from unisono.checkpoint._tracking import Holder as Holder
from unisono.collectives._process_group import ProcessGroup as ProcessGroup
from unisono._system._environ import process_environ as process_environ
from unisono.data._distribute import batches_of as batches_of
from unisono.step._layout import StateLayout as StateLayout
from unisono.step.functions._function import Function as Function
from unisono.step.variables._seeds import set_step_seed as set_step_seed
from unisono.step.variables._variable_store import VariablesByPath as VariablesByPath
from unisono.strategies._one_device import (
    default_strategy as default_strategy,
    hold_by_default as hold_by_default,
)
from unisono.strategies._replicated import ReplicatedStrategy as ReplicatedStrategy
from unisono.training._bind import wrap_keras as wrap_keras
from unisono.training.replica._running_step import RunningStep as RunningStep, running_step as running_step
