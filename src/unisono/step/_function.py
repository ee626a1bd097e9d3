"""`unisono.function`: a whole training step, with `strategy.run` and `reduce` inside, as one program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

from unisono._context import current, get_strategy
from unisono._errors import InvalidTypeError, MixedStrategyError
from unisono._values import PerReplica
from unisono.step._call import Call, Kind
from unisono.step._compiler import Entry
from unisono.step._functional import Plan, discarded, discover
from unisono.step._program import Program, Run, current_frame
from unisono.step._scope import StateScope


class Function:
    """A function that is compiled, once per signature, when it is called.

    Args:
        fn: may read and write Keras variables, create them in its first call, use
            `GradientTape`, and call `strategy.run` and `strategy.reduce`.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._entries: dict[Hashable, Entry] = {}
        functools.update_wrapper(self, fn)

    @property
    def num_programs(self) -> int:
        """How many programs were compiled."""
        return len(self._entries)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled function; inside another one it becomes a part of that."""
        if current_frame() is not None:
            return self._fn(*args, **kwargs)
        call = Call.parse(args, kwargs)
        context = current()
        key = (call.signature, context.strategy if context else None)
        if key not in self._entries:
            self._entries[key] = self._build(call)
        return self._entries[key](call)

    def __get__(self, instance: Any, owner: type) -> Any:
        """Bind to an object when used as a method."""
        return self if instance is None else functools.partial(self.__call__, instance)

    def _build(self, call: Call) -> Entry:
        scopes: list[StateScope] = []
        discover(lambda arrays: discarded(self._trace(call, None, [], arrays, scopes)), call.arrays)
        plan = Plan.from_cross_replica(scopes[-1])
        used = scopes[-1].strategies
        strategy, is_shared = _one_strategy(used), bool(used)

        def traced(values: list[Any], arrays: list[Any]) -> tuple[Any, list[Any]]:
            result = self._trace(call, plan, values, arrays, scopes)
            scope = scopes[-1]
            written = [s for s in plan.slots if s.written]
            new = [
                scope.copies[id(s.variable)] if s.is_stacked else scope.state_mapping[id(s.variable)]
                for s in written
            ]
            return result[0], new

        return Entry(traced, plan, strategy, is_shared)

    def _trace(
        self, call: Call, plan: Plan | None, values: list[Any], arrays: list[Any], scopes: list[StateScope]
    ) -> tuple[Any]:
        pairs = list(zip(plan.slots, values, strict=True)) if plan else []
        plain = [(s.variable, v) for s, v in pairs if not s.is_stacked]
        stacked = [(s.variable, v) for s, v in pairs if s.is_stacked]
        args, kwargs = call.rebuild(arrays, _per_replica)
        program = Program(
            [lambda: self._fn(*args, **kwargs)], [lambda: StateScope(plain, stacked)], [lambda _: None]
        )
        result, frame = Run(program).complete(0)
        scopes.append(frame.scope)
        if plan is not None:
            plan.check_known(frame.scope)
        return (result,)


def _per_replica(kind: Kind, part: tuple[Any, ...]) -> PerReplica:
    return PerReplica.from_stacked(part[0]) if kind is Kind.SPLIT else PerReplica(part)


def _one_strategy(strategies: set[Any]) -> Any:
    if len(strategies) > 1:
        raise MixedStrategyError(
            "A function may call `run` of one strategy only. Received: "
            f"{sorted(repr(s) for s in strategies)}. Write one `@unisono.function` for each."
        )
    return next(iter(strategies)) if strategies else get_strategy()


def function(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile a function with all its `strategy.run` and `reduce` calls into one program.

    Like `tf.function`: a program is made for each signature (shapes and types of arrays, values
    of Python objects), variables may be created in the first call, and Python side effects
    happen while tracing only.

    Args:
        fn: the function; without it, a decorator is returned.
        **options: `jit_compile` and `reduce_retracing` are accepted for tf.function's signature
            and change nothing: every function is compiled by XLA.

    Returns:
        A `Function`.

    >>> import numpy as np
    >>> @function
    ... def double(x):
    ...     return x * 2
    >>> float(double(np.float32(3)))
    6.0
    """
    unknown = sorted(set(options) - {"jit_compile", "reduce_retracing"})
    if unknown:
        raise InvalidTypeError(f"`function` takes `jit_compile` and `reduce_retracing`. Received: {unknown}.")
    return Function if fn is None else Function(fn)
