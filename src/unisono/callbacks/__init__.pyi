"""The public names of `unisono.callbacks`; they are loaded when they are first used."""

from unisono.callbacks._backup import BackupAndRestore as BackupAndRestore
from unisono.callbacks._tensorboard import TensorBoard as TensorBoard
from unisono.callbacks._timer import StepTimer as StepTimer
from unisono.training.groups._peak_flops import set_peak_flops as set_peak_flops
