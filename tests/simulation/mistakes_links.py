"""Mistakes in the connection between a client and standalone servers."""

from tests.simulation._planted import Mistake

_LINK = "unisono.standalone._link"
_JOB = "unisono.standalone._server_job"
_AGENT = "unisono.standalone._agent"


def _mistake(name, place, old, new):
    return Mistake(name, place, old, new, "links")


MISTAKES = (
    _mistake(
        "processes that count as lost run on beside new ones",
        f"{_LINK}:ServerLink._note_server",
        "elif self._has_lost:",
        "elif False:",
    ),
    _mistake(
        "output that was sent is sent again",
        f"{_LINK}:ServerLink._apply",
        'process.offset = entry["offset"]',
        "pass",
    ),
    _mistake(
        "the end is told before the last output",
        f"{_JOB}:ServerJob.news",
        'is_complete = entry["offset"] >= size_of(files.log)',
        "is_complete = True",
    ),
    _mistake(
        "a job that a server has ended counts as found",
        f"{_LINK}:ServerLink._look_for_server",
        "elif self._beginnings != beginnings:",
        "elif False:",
    ),
    _mistake(
        "a lost connection loses the processes",
        f"{_LINK}:ServerLink._look_for_server",
        "elif (problem := self._search()) or self._info is None:",
        'elif (problem := "it does not answer"):',
    ),
    _mistake(
        "the program is brought to the first beginning alone",
        f"{_LINK}:ServerLink._note_server",
        "if taken != self._taken:",
        "if self._taken is None:",
    ),
    _mistake("a lost server is not looked for", f"{_LINK}:ServerLink._turn", "self._find()", "pass"),
    _mistake(
        "processes of a lost server run on in the launcher",
        f"{_LINK}:ServerLink._lose",
        "process.lose(text, at)",
        "pass",
    ),
    _mistake(
        "a job is not ended with its client",
        f"{_LINK}:ServerLink.close",
        "self.request(Op.END, timeout=_SWEEP_SECONDS)",
        "pass",
    ),
    _mistake(
        "results are not fetched",
        f"{_LINK}:ServerLink._apply",
        'if entry.get("code") == 0:',
        "if False:",
    ),
    _mistake(
        "a process starts before its program is brought",
        f"{_LINK}:ServerLink.start_process",
        "while self.is_live and",
        "while self._info is not None and",
    ),
    _mistake(
        "a sweep whose connection is lost is not repeated",
        f"{_LINK}:ServerLink.sweep",
        "self._closing.wait(_PROBE_PAUSE)",
        "return 0",
    ),
    _mistake(
        "a result that is lost with its server is a success",
        f"{_LINK}:ServerLink._fetch_result",
        "if error.kind == InvalidArgumentError.__name__:",
        "if True:",
    ),
    _mistake(
        "what a job has left behind stays",
        "unisono.standalone._remote_machines:RemoteMachines.sweep",
        "link.sweep()",
        "pass",
    ),
    # That a process' end does not wake the launcher is harmless: news wake it, too, and it looks by itself.
    _mistake(
        "a result that takes several messages is cut",
        f"{_LINK}:ServerLink._fetch_result",
        'while len(data) < answer.meta["size"]:',
        "while False:",
    ),
)
