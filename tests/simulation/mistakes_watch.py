"""Mistakes in the ports of workers for `unisono watch`, and in those who watch."""

from tests.simulation._planted import Mistake

_PORT = "unisono.cluster._watch_port"
_WORKER = "unisono.watch._worker_folder"
_ADDRESS = "unisono.watch._address_folder"


def _mistake(name, place, old, new):
    return Mistake(name, place, old, new, "watch")


MISTAKES = (
    _mistake(
        "who asks while the port closes is not told the end",
        f"{_PORT}:WatchPort._handle",
        "ended = self._ended",
        "ended = None",
    ),
    _mistake(
        "a job whose folder of events was removed ends with an error",
        f"{_PORT}:WatchPort.end",
        "with contextlib.suppress(OSError):",
        "with contextlib.suppress(KeyError):",
    ),
    _mistake(
        "the last events are not written before the end is told",
        f"{_PORT}:WatchPort.end",
        "flush()",
        "pass",
    ),
    _mistake(
        "the next file of a path is read from where the last one was",
        f"{_PORT}:WatchPort._answer",
        'request.meta.get("file") != name or ',
        "",
    ),
    _mistake(
        "the end is not waited for",
        f"{_PORT}:WatchPort._handle",
        'if request.meta.get("until") != "end":',
        "if True:",
    ),
    _mistake(
        "an answer to an older question is added whole",
        f"{_WORKER}:WatchedWorker._take",
        "data = data[self._offset - offset :]",
        "pass",
    ),
    _mistake(
        "a task that was lost counts as ended well",
        f"{_WORKER}:WorkerFolder._note_end",
        "self._ended[task] = 1 if code is None else code",
        "self._ended[task] = code or 0",
    ),
    _mistake(
        "a job whose tasks do not answer is waited for",
        f"{_WORKER}:WorkerFolder._note_quit",
        "if not code or is_gone:",
        "if not code:",
    ),
    _mistake(
        "the connection that has asked who answers stays open",
        f"{_ADDRESS}:_is_worker",
        "with contextlib.closing(RpcClient(task, address, keys, watch_port.LIMIT)) as client:",
        "with contextlib.nullcontext(RpcClient(task, address, keys, watch_port.LIMIT)) as client:",
    ),
    _mistake(
        "a rejected key counts as a task that is away",
        f"{_ADDRESS}:folder_at",
        "except PeerRejectedError as error:",
        "except ZeroDivisionError as error:",
    ),
)
