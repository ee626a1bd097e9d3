"""Mistakes in how standalone servers check requests, and in what they show to those who look."""

from tests.simulation._planted import Mistake


def _mistake(name, place, old, new):
    return Mistake(name, place, old, new, "wrong_clients")


MISTAKES = (
    _mistake(
        "a file of a job may lie elsewhere",
        "unisono.standalone._protocol:file_name",
        "problem = name_problem(text)",
        "problem = None",
    ),
    _mistake(
        "a number has no upper limit",
        "unisono.rpc._fields:whole",
        "if number is None or number > most:",
        "if number is None:",
    ),
    _mistake(
        "a watcher reads every file",
        "unisono.standalone._server_job:ServerJob.look",
        'if name.partition("/")[0] not in _SEEN_FOLDERS:',
        "if False:",
    ),
    _mistake(
        "any job is answered",
        "unisono.standalone._lease_book:LeaseBook.check",
        "held is None or held.job != job or held.ends",
        "held is None or held.ends",
    ),
    _mistake(
        "a message may have several blobs",
        "unisono.standalone._agent:_blob",
        "len(frame.arrays) != 1",
        "len(frame.arrays) < 1",
    ),
)
