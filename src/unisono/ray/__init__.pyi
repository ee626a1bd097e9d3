"""The public names of `unisono.ray`; they are loaded when they are first used."""

from unisono.ray._report import ReportCallback as ReportCallback, storage_path as storage_path
from unisono.ray._trainer import Trainer as Trainer
