"""Types of strings of which there are few. Type checkers alone import them.

Tests: tests/typing/right_and_wrong.py.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

#: None, where a type checker need not ask for a check: most callers know that there is a value.
MaybeNone: TypeAlias = Any

#: The names of `ReduceOp`.
ReduceOpName: TypeAlias = Literal["SUM", "MEAN", "sum", "mean"]

#: The names of `CommunicationImplementation`.
ImplementationName: TypeAlias = Literal["AUTO", "RING", "NCCL", "auto", "ring", "nccl"]

#: The names of `VariableSynchronization` and `VariableAggregation`.
SynchronizationName: TypeAlias = Literal[
    "auto", "none", "on_read", "on_write", "AUTO", "NONE", "ON_READ", "ON_WRITE"
]
AggregationName: TypeAlias = Literal[
    "none", "sum", "mean", "only_first_replica", "NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"
]

#: Where variables and the optimizer's state rest between steps.
StateLayoutName: TypeAlias = Literal["mirrored", "sharded", "fully_sharded"]

#: How the values of a row's categories are combined.
Combiner: TypeAlias = Literal["sum", "mean", "sqrtn"]
