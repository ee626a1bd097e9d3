"""Directories of models and modules: functions as StableHLO, and variables."""
