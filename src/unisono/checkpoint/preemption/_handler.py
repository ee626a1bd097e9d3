"""`PreemptionCheckpointHandler`: a custom loop saves before its process is ended, and resumes later.

Source of the names:
https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/PreemptionCheckpointHandler
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import math
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from unisono._errors import ClusterError, ContextError, InvalidArgumentError, InvalidTypeError
from unisono._system._interrupts import in_main_thread
from unisono._system._object_store import place_of
from unisono._system._signals import RESTART_WANTED, SignalWatch
from unisono._types import UserValue
from unisono.checkpoint._checkpoint import Checkpoint
from unisono.checkpoint._manager import CheckpointManager
from unisono.checkpoint.preemption._save_consensus import SaveConsensus, consensus_of
from unisono.checkpoint.preemption._watcher import PollWatch, PreemptionNotice
from unisono.collectives._process_group import joined_group

if TYPE_CHECKING:
    from unisono.cluster_resolver._base import ClusterResolver

_LOG = logging.getLogger("unisono")


def make_consensus(resolver: ClusterResolver | None) -> SaveConsensus:
    """Return how the processes of the cluster agree on a step.

    With a grace period a consensus serves twice: after the agreed step, the next `wanted` begins another.

    Raises:
        ClusterError: the resolver describes several processes, and this one has joined none.
    """
    group = joined_group()
    if resolver is not None and group.size < resolver.num_processes:
        raise ClusterError(
            "The processes of a cluster must be connected before they can agree on a step. Received: "
            f"num_processes={resolver.num_processes} in a process that has joined no cluster. "
            "Create the strategy first."
        )
    return consensus_of(group)


@dataclasses.dataclass(frozen=True)
class TerminationConfig:
    """How a handler notices that the process is about to be ended, and what it does then.

    Args:
        termination_watcher_fn: called each second by a thread; returns True when the process is about to be
            ended. Without it, the handler watches SIGTERM.
        exit_fn: called when all is saved; `sys.exit(42)` by default.
        grace_period: seconds from the notice to the end. With more than 0, the handler saves at once,
            training continues, and it saves again before they are over.
        save_fn: saves instead of the manager; gets the arguments of `save_checkpoint_if_preempted`.

    Raises:
        InvalidArgumentError: when `grace_period` is negative or not finite.
        InvalidTypeError: when one of the others cannot be called.

    >>> TerminationConfig(grace_period=30.0).grace_period
    30.0
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], object] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., object] | None = None

    def __post_init__(self) -> None:
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise InvalidTypeError(
                    f"`{name}` must be a function. Received: {name}={value!r}. Write `{name}=lambda: ...`."
                )
        period = self.grace_period
        if period is not None and not (math.isfinite(period) and period >= 0):
            raise InvalidArgumentError(
                f"`grace_period` must be a number of seconds, 0 or more. Received: grace_period={period!r}. "
                "Write what the platform gives you, such as `grace_period=30`."
            )


class _RunCalls:
    """The number of steps, as a checkpoint keeps it."""

    def __init__(self) -> None:
        self.count = 0

    def get_state(self) -> int:
        return self.count

    def set_state(self, state: int) -> None:
        self.count = int(state)


class PreemptionCheckpointHandler:
    """Saves a custom loop when the machine is about to be taken away, and restores it when it starts again.

    The latest checkpoint is restored on creation. After SIGTERM, the step that runs is ended, everything
    is saved, and the program ends with code 42, for a supervisor that starts it again. What belongs to a
    step (a counter, the next batch) belongs into the function that `run` calls: it is saved between calls.

    Args:
        cluster_resolver: the strategy's `cluster_resolver`; None for one process.
        checkpoint_or_checkpoint_manager: what to save, and with a manager also where. It must save and
            restore everything that the loop needs; the number of steps is added to it.
        checkpoint_dir: where, for a `Checkpoint`.
        termination_config: how the notice arrives, and what is done then.

    Raises:
        InvalidArgumentError: when it is not said where to save, or the cluster has parameter servers.
        ContextError: outside of the main thread, where SIGTERM cannot be watched.
        CheckpointError: when the checkpoints that are there cannot be restored.
        ClusterError: when the workers found checkpoints of different steps.

    >>> import tempfile, keras
    >>> total = keras.Variable(0)
    >>> with PreemptionCheckpointHandler(None, Checkpoint(total=total), tempfile.mkdtemp()) as handler:
    ...     for step in range(handler.total_run_calls, 3):
    ...         _ = handler.run(total.assign_add, step)
    >>> int(total.value), handler.total_run_calls
    (3, 3)
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        self._config = termination_config or TerminationConfig()
        self._grace = self._config.grace_period or 0.0
        self._manager = _manager_of(checkpoint_or_checkpoint_manager, checkpoint_dir)
        _refuse_parameter_servers(cluster_resolver)
        self._is_chief = cluster_resolver is None or cluster_resolver.process_id == 0
        self._agreement = make_consensus(cluster_resolver)
        self._notice, self._pace = PreemptionNotice(time.monotonic), StepTiming(time.monotonic)
        self._saved = False
        self._calls = _RunCalls()
        is_ending = self._config.termination_watcher_fn
        self._signals: SignalWatch | None = None
        # The watches do not refer to the handler, which can so be collected.
        if is_ending is not None:
            self._stop = weakref.finalize(self, PollWatch(self._notice, is_ending).stop)
        else:
            self._signals = _watch_sigterm(self._notice)
            self._stop = weakref.finalize(self, self._signals.restore)
        try:
            # Before restoring, which sets the number of steps.
            self._manager.checkpoint._include(total_run_calls=self._calls)
            self._manager.restore_or_initialize()
            self._agreement.begin(self._calls.count)
        # A constructor that fails must leave neither its SIGTERM handler nor its thread behind.
        except BaseException:
            self.close()
            raise

    @property
    def total_run_calls(self) -> int:
        """How many steps were done, in this process and in those before it."""
        return self._calls.count

    def run(self, fn: Callable[..., UserValue], *args: UserValue, **kwargs: UserValue) -> UserValue:
        """Do one step; save after it and end the program if the end is near.

        Args:
            fn: the step; usually calls `strategy.run`.
            *args: for `fn`.
            **kwargs: for `fn`.

        Returns:
            What `fn` returns.

        Raises:
            SystemExit: all is saved, and the program should be started again.
        """
        result = fn(*args, **kwargs)
        self.save_checkpoint_if_preempted()
        return result

    def save_checkpoint_if_preempted(self, *args: UserValue, **kwargs: UserValue) -> None:
        """Say that a step is done; save and end the program if the end is near. Instead of `run`.

        Args:
            *args: for `save_fn` or else the manager's `save`.
            **kwargs: likewise.

        Raises:
            SystemExit: all is saved, and the program should be started again.
        """
        self._calls.count += 1
        self._pace.step_ended()
        self._check(args, kwargs)

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Wrap a training loop; on exit, handle a preemption notice that arrived after the last step.

        Raises:
            SystemExit: all is saved, and the program should be started again.
        """
        yield
        self._check((), {}, is_last=True)

    def close(self) -> None:
        """Restore the handler that SIGTERM had before; call it if the signal arrived after the last save.

        Raises:
            BaseException: what that handler raises.
        """
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        if self._signals is not None:
            self._signals.__exit__(kind, error, trace)

    def _check(
        self, args: tuple[UserValue, ...], kwargs: dict[str, UserValue], *, is_last: bool = False
    ) -> None:
        if self._notice.error is not None:
            # The watcher failed in its own thread: without this, the preemption would go unnoticed.
            error, self._notice.error = self._notice.error, None
            raise error
        wanted = wants_save(
            time.monotonic(),
            self._notice.at,
            saved=self._saved,
            grace=self._grace,
            needed=self._pace.needed() + self._agreement.delay,
        )
        step = self._calls.count
        agreed = self._agreement.agree(step, wanted, is_last=is_last)
        if agreed is None or step < agreed:
            return
        with self._pace.saving():
            self._save(args, kwargs)
        # With a grace period the first save is a precaution, and the second one ends the program.
        ends = self._saved or not self._grace
        self._saved = not ends
        if ends:
            # A user's `exit_fn` may return: then the loop continues, and the next notice counts.
            self._notice.at = None
            self._agreement.finish()
            _LOG.warning("Saved after step %d; this process ends, to be started again.", step)
            try:
                # First the handler that the program had: also if it raises, `exit_fn` is called.
                if self._signals is not None:
                    self._signals.pass_on()
            finally:
                (self._config.exit_fn or _exit)()

    def _save(self, args: tuple[UserValue, ...], kwargs: dict[str, UserValue]) -> None:
        if self._config.save_fn is not None:
            self._config.save_fn(*args, **kwargs)
        elif self._is_chief:
            self._manager.save(*args, **kwargs)
        else:
            self._manager.checkpoint._read_along()
        # Also what `save_fn` began with the manager must be on the disk.
        self._manager.close()


def _watch_sigterm(notice: PreemptionNotice) -> SignalWatch:
    if not in_main_thread():
        raise ContextError(
            "A handler of SIGTERM must be made in the main thread. Received: thread "
            f"{threading.current_thread().name!r}. Make it there, or pass "
            "`TerminationConfig(termination_watcher_fn=...)`, which needs no signal."
        )
    return SignalWatch(notice.record, signal.SIGTERM)


def _exit() -> None:
    sys.exit(RESTART_WANTED)


def _manager_of(
    what: Checkpoint | CheckpointManager, directory: str | os.PathLike[str] | None
) -> CheckpointManager:
    if isinstance(what, CheckpointManager):
        if directory is not None and place_of(directory) != what.directory:
            raise InvalidArgumentError(
                "`checkpoint_dir` must be left out for a manager, which has its own. Received: "
                f"checkpoint_dir={os.fspath(directory)!r}, and a manager of {what.directory}."
            )
        return what
    if not isinstance(what, Checkpoint):
        raise InvalidTypeError(
            "`checkpoint_or_checkpoint_manager` must be one of them. Received: "
            f"{type(what).__name__}. Write `unisono.checkpoint.Checkpoint(model=model, optimizer=optimizer)`."
        )
    if not directory:
        raise InvalidArgumentError(
            "`checkpoint_dir` must name a directory for a `Checkpoint`. Received: "
            f"checkpoint_dir={directory!r}. Write `checkpoint_dir='checkpoints'`, or pass a manager."
        )
    # Two: a damaged one is passed over for the one before.
    return CheckpointManager(what, directory, max_to_keep=2, checkpoint_name="preemption", asynchronous=False)


def _refuse_parameter_servers(resolver: ClusterResolver | None) -> None:
    if resolver is not None and "ps" in list(resolver.cluster_spec()):
        raise InvalidArgumentError(
            "A `PreemptionCheckpointHandler` is for workers that train in step. Received: a cluster with "
            "parameter servers. Save from the coordinator with a `CheckpointManager`."
        )


class StepTiming:
    """How long a step and a save take, so that the last save starts in time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: float | None = None
        # Without the first step, which compiles and takes much longer than the others.
        self._steps: collections.deque[float] = collections.deque(maxlen=10)
        self._save = 0.0

    def step_ended(self) -> None:
        """Note that a step has ended and the next one begins."""
        now = self._clock()
        if self._since is not None:
            self._steps.append(now - self._since)
        self._since = now

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Measure a save; the time does not count as a step."""
        began = self._clock()
        yield
        self._since = self._clock()
        self._save = max(self._save, self._since - began)

    def needed(self) -> float:
        """Return the seconds for a step in which the workers agree, the step after it, and a save.

        Twice the longest that was measured: a shared disk is at times much slower than usual.
        """
        return 2 * (2 * max(self._steps, default=0.0) + self._save)


def wants_save(now: float, noticed_at: float | None, *, saved: bool, grace: float, needed: float) -> bool:
    """Return whether a process should save. Pure.

    Args:
        noticed_at: when the notice of the end arrived, None before.
        saved: whether it has been saved since then.
        grace: seconds from the notice to the end.
        needed: seconds that a save must begin before the end.

    >>> wants_save(50.0, 40.0, saved=True, grace=30.0, needed=4.0)
    False
    """
    if noticed_at is None:
        return False
    return not saved or now >= noticed_at + grace - needed
