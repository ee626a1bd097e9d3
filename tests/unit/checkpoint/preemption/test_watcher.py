import gc
import os
import signal

from unisono.checkpoint.preemption._watcher import PreemptionNotice
from unisono.experimental import PreemptionWatcher


def test_the_first_word_counts():
    times = iter([100, 105])
    notice = PreemptionNotice(lambda: next(times))
    notice.record()
    notice.record()
    assert notice.at == 100


def test_a_watcher_notes_the_signal_and_leaves_the_process_alone():
    before = signal.getsignal(signal.SIGTERM)
    watcher = PreemptionWatcher()
    assert watcher.preemption_message is None
    os.kill(os.getpid(), signal.SIGTERM)
    assert watcher.preemption_message.startswith("this process received SIGTERM 0 s ago")
    watcher.block_until_worker_exit()
    watcher.close()
    assert signal.getsignal(signal.SIGTERM) == before
    other = PreemptionWatcher()
    del other
    gc.collect()
    assert signal.getsignal(signal.SIGTERM) == before
