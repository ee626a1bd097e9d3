"""Mistakes where several chiefs begin at the same moment."""

from tests.simulation._mistakes import Mistake

MISTAKES = (
    Mistake(
        "a generation is taken twice",
        ("chiefs",),
        "parameter_server.server._client:ServerClient.begin_job",
        'answer.meta["chief"] == self._name',
        "answer",
    ),
)
