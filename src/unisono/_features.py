"""The optional features, by what the core asks for: the one table below the strategies that names them.

A feature is one folder. The first program that uses it loads it, and everything else works without it.

Tests: tests/virtual/test_shut_doors.py.
"""

from __future__ import annotations

from typing import Any

from unisono._names import feature_module

#: From what is asked for to the module and name that has it.
FEATURES = {
    "sharded layout": "unisono.sharding._sharded_layout:ShardedLayout",
    "fully sharded layout": "unisono.sharding._fully_sharded_layout:FullyShardedLayout",
    "replicas of several devices": "unisono.model_parallel._replica_grid:ReplicaGrid",
    "layout of a replica's devices": "unisono.model_parallel._cut_layout:cut_layout",
    "replicas of an evaluator": "unisono.model_parallel._layout_rules:of_evaluator",
    "state in parts of several devices": "unisono.model_parallel._sharded_grid:sharded_cut_layout",
    "layout of replicas across processes": "unisono.model_parallel._spanning_layout:SpanningLayout",
    "parts of parts across processes": "unisono.model_parallel._spanning_shards:divided_over_replicas",
    "tensors on a replica's devices": "unisono.model_parallel._logical_devices:lying_on_devices",
    "layout by a model's program": "unisono.model_parallel._automatic_layout:AutomaticStateLayout",
    "steps in TensorFlow's form": "unisono.training.stateful._stateful_function:StatefulFunction",
    "Keras' step in TensorFlow's form": "unisono.training.stateful._inherited_steps:inherited_step",
    "call of a step in TensorFlow's form": "unisono.training.stateful._form:note_call",
    "variables of a step in TensorFlow's form": "unisono.training.stateful._form:preparation_of",
    "reading of a step of your own": "unisono.training.replica._own_step_reading:read_own_step",
    "programs of steps": "unisono.step.programs._programs_of_steps:ProgramsOfSteps",
    "values of a step": "unisono.step.programs._python_reads:watch_of",
    "reading of a step of `run`": "unisono.training.replica._replicated_reading:warn_of_guesses",
    "check for whole batches": "unisono.training.replica._whole_batches:warn_of_whole_batch",
    "check for NaNs": "unisono.step._explain:require_numbers",
    "explanation of an error": "unisono.step._explain:explain",
    "failure of a step": "unisono.step._explain:raise_unless_past",
    "mistake": "unisono.training._mistakes:mistake",
    "explanation of an error of data": "unisono.training._mistakes:explain_data",
    "note on a last error": "unisono.training._mistakes:note_on",
    "arrays of frames": "unisono.training._frames:arrays_of_frames",
    "explanation of a last error": "unisono.step._explain:explain_at_end",
    "recording of eager code": "unisono.step.eager._recording:TapeRecording",
    "recorder of eager code": "unisono.step.eager._recording:recorder_here",
    "derivative of eager code": "unisono.step.eager._backward:differentiate",
    "groups of constant length": "unisono.training.groups._constant_groups:ConstantGroups",
    "data on the devices": "unisono.training.resident._data_of_call:data_of_call",
    "strings on the host": "unisono.training._host_layers:encoded_arguments",
    "class CompressedAllReduce": "unisono.compression._compressed_all_reduce:CompressedAllReduce",
    "class LocalUpdates": "unisono.local_updates._local_updates:LocalUpdates",
    "signs of other tasks": "unisono.cluster._lone_task:warning_in_tasks",
    "tasks of TF_CONFIG": "unisono.cluster._lone_task:warning_alone",
    "atomic writing of a model": "unisono._export._model_files:write_whole",
    "copy of a stored model": "unisono._export._model_files:local_file",
    "work of steps": "unisono.training.groups._step_work:StepWork",
    "work of a batch": "unisono.training.groups._step_work:WorkOfBatch",
    "events of a task": "unisono.cluster.liveness._task_events:TaskEventFile",
    "report of a fit": "unisono.training._fit_report:FitReport",
    "heartbeat of a task": "unisono.cluster.liveness._heartbeat_file:HeartbeatFile",
    "strategy of several workers": "unisono.cluster.strategy._multi_worker:MultiWorkerMirroredStrategy",
}


def load(asked: str) -> Any:
    """Return an optional part, and load its feature at the first time.

    Args:
        asked: a key of the table.

    Raises:
        MissingPackageError: this installation lacks the feature's folder.

    >>> load("sharded layout").__name__
    'ShardedLayout'
    """
    path, _, name = FEATURES[asked].partition(":")
    return getattr(feature_module(path, asked), name)
