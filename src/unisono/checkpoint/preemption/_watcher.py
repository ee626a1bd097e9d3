"""`PreemptionWatcher`: whether this process received SIGTERM.

Source of the name:
https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/PreemptionWatcher
"""

from __future__ import annotations

import signal
import time
import weakref

from unisono._system._signals import SignalWatch
from unisono.checkpoint.preemption._notice import PreemptionNotice
from unisono.cluster._distributed import joined_group


class PreemptionWatcher:
    """Notes SIGTERM from its creation on, for a program that decides itself what to do then.

    The process continues after SIGTERM, and should save and end soon. Signals to other workers are not
    noted: when such a worker ends, this one receives a `ClusterError`. To save and end after the same step
    on all workers, use `PreemptionCheckpointHandler` or `BackupAndRestore(save_before_preemption=True)`.

    Raises:
        ContextError: outside of the main thread.

    >>> watcher = PreemptionWatcher()
    >>> watcher.preemption_message is None
    True
    >>> watcher.close()
    """

    def __init__(self) -> None:
        self._notice = PreemptionNotice(time.monotonic)
        self._watch = SignalWatch(self._notice.record, signal.SIGTERM)
        # The watch does not refer to this object, which can so be collected.
        self._restore = weakref.finalize(self, self._watch.restore)

    @property
    def preemption_message(self) -> str | None:
        """What was received; None as long as nothing was."""
        if self._notice.at is None:
            return None
        who = joined_group().own_name
        return f"{who} received SIGTERM {time.monotonic() - self._notice.at:.0f} s ago"

    def block_until_worker_exit(self) -> None:
        """Return at once: in TensorFlow, it keeps a coordinator from connecting to workers that end."""

    def close(self) -> None:
        """Restore the handler that SIGTERM had before; it is called if the signal arrived meanwhile."""
        self._restore()
        self._watch.pass_on()
