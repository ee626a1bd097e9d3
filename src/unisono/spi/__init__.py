"""What code above the strategies may import of the engine: a strategy of your own, another training loop.

`unisono.estimator` and `unisono.tf` stand on these names and on public ones. A strategy derives from
`ReplicatedStrategy`, with a `ReplicaMesh` of devices (`resolve_devices`), a `StateLayout` and, of several
processes, a `ProcessGroup`. A training loop lets `Strategy.make_step_runner` run its steps, keeps variables
by path (`VariablesByPath`) and compiled programs (`Executables`), and asks inside of a step `running_step()`.
What wraps Keras' own vocabulary calls `wrap_keras`, `hold_by_default` where a model is compiled, knows a
`Function`, and derives from `Holder` what a checkpoint saves by its names.

Names are loaded when they are first used.
"""

from unisono import _names

__getattr__, __dir__, __all__ = _names.lazy_names(__name__)
