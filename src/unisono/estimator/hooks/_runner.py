"""Calls hooks between groups of steps, and says how long a group may be.

Tests: tests/unit/estimator/test_hook_runner.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono.estimator.hooks._hook import (
    GLOBAL_STEP,
    HookSession,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    check_feed,
)

#: The most steps of a group: a NaN loss is noticed after so many steps.
MOST_STEPS = 100


class HookRunner:
    """The hooks of one loop.

    A loop calls `begin`, restores variables, calls `after_create_session`, and then, until `should_stop`,
    `before_step`, runs at most as many steps as that returned, and calls `after_step` with the values of the
    last one. At its end it calls `end`, not after an error.

    Args:
        hooks: in the order in which they are called.
        session: what they see; None for one that knows nothing.

    Raises:
        InvalidTypeError: something is not a `SessionRunHook`.

    >>> runner = HookRunner([])
    >>> runner.begin()
    >>> runner.should_stop
    False
    """

    def __init__(self, hooks: Sequence[SessionRunHook], session: HookSession | None = None) -> None:
        for hook in hooks:
            if not isinstance(hook, SessionRunHook):
                raise InvalidTypeError(
                    f"Hooks must be instances of `SessionRunHook`. Received: {hook!r}. Derive its class from "
                    "`unisono.estimator.SessionRunHook`."
                )
        self.hooks = list(hooks)
        self.session = HookSession() if session is None else session
        self._asked: list[tuple[SessionRunHook, SessionRunArgs | None]] = []
        self._context = SessionRunContext(self.session)
        self._before = 0
        self._is_stopping = False

    @property
    def should_stop(self) -> bool:
        """True if a hook has asked to stop."""
        return self._is_stopping

    @property
    def wanted(self) -> frozenset[str]:
        """The names of the values that `after_step` needs, besides `"global_step"`."""
        keys = (self.session.keys(args.fetches) for _, args in self._asked if args is not None)
        return frozenset().union(*keys) - {GLOBAL_STEP}

    def begin(self) -> None:
        """Call all hooks' `begin`."""
        for hook in self.hooks:
            hook.begin()

    def after_create_session(self) -> None:
        """Call all hooks' `after_create_session`."""
        for hook in self.hooks:
            hook.after_create_session(self.session, None)

    def before_step(self, global_step: int) -> int:
        """Call all hooks' `before_run`.

        Args:
            global_step: the number of steps so far.

        Returns:
            How many steps may run until `after_step`, at least 1.
        """
        limits = [_limit(hook, global_step) for hook in self.hooks]
        steps = max(1, min([MOST_STEPS, *(n for n in limits if n is not None)]))
        self._before = global_step
        self._context = SessionRunContext(self.session, steps)
        self._asked = [(hook, self._asked_by(hook)) for hook in self.hooks]
        return steps

    def _asked_by(self, hook: SessionRunHook) -> SessionRunArgs | None:
        args = hook.before_run(self._context)
        if args is None:
            return None
        if not isinstance(args, SessionRunArgs):
            raise InvalidTypeError(
                f"`before_run` must return `SessionRunArgs` or None. Received: {args!r} from {hook!r}. Write "
                "`return SessionRunArgs(fetches)`."
            )
        check_feed(args.feed_dict)
        return args

    def after_step(self, values: Mapping[str, Any]) -> None:
        """Call all hooks' `after_run`.

        Args:
            values: of the last step by name, at least `wanted`. They may lie on a device: what no
                hook has asked for is not read. `"global_step"` is the number of steps so far; without it
                all steps of the group have run.
        """
        step = int(values.get(GLOBAL_STEP, self._before + self._context.steps))
        self._context.steps = step - self._before
        missing = self.wanted - set(values)
        if missing:
            raise InvalidArgumentError(f"A step must return what hooks ask for. It lacks {sorted(missing)}.")
        self.session.values = values
        for hook, args in self._asked:
            results = None if args is None else self.session.run(args.fetches)
            hook.after_run(self._context, SessionRunValues(results, args and args.options))
        self._is_stopping = self._is_stopping or self._context.stop_requested
        self._asked = []

    def request_stop(self) -> None:
        """End the loop, as a hook can."""
        self._is_stopping = True

    def end(self) -> None:
        """Call all hooks' `end`."""
        for hook in self.hooks:
            hook.end(self.session)


def _limit(hook: SessionRunHook, global_step: int) -> int | None:
    """Return after how many steps a hook must be called; None for any number."""
    known = getattr(hook, "steps_until_next", None)
    if known is not None:
        limit: int | None = known(global_step)
        return limit
    own = type(hook)
    is_called = (
        own.before_run is not SessionRunHook.before_run or own.after_run is not SessionRunHook.after_run
    )
    return 1 if is_called else None
