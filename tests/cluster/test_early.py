"""Workers that leave a custom loop before the others, or make a call alone."""

from pathlib import Path

import pytest

from tests.cluster._workers import Workers

PROGRAM = str(Path(__file__).parent / "programs" / "early.py")


@pytest.mark.parametrize(
    ("mode", "raised", "words"),
    [
        (
            "break",
            [0],
            "All workers must take the same steps until all are done. Received: worker 1 of 2 has come to "
            "the end of its program after 4 steps; worker 0 at 127.0.0.1:",
        ),
        (
            "evaluate",
            [0, 1],
            "All workers must make the same calls of `fit`, `evaluate` and `predict`. Received: step 5 is "
            "'a call of `evaluate`' on process 0, but 'run with",
        ),
    ],
)
def test_the_others_raise_at_once(tmp_path, mode, raised, words):
    workers = Workers(tmp_path, [PROGRAM, str(tmp_path), mode])
    # Far less than any timeout of a cluster.
    assert workers.wait(50) == [1, 1], workers.text()
    assert [i for i in range(2) if (tmp_path / f"raised-{i}").exists()] == raised, workers.text()
    for log in workers.logs:
        assert words in log.read_text(), workers.text()
