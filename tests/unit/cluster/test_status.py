"""What a process answers about itself."""

import pytest

from unisono.cluster.liveness._status import WorkerStatus, describe_step


def test_a_batch_is_new_when_its_shapes_or_its_step_are():
    status = WorkerStatus()
    batches = [
        ("train", ((8, 3),)),
        ("train", ((8, 3),)),
        ("train", ((7, 3),)),
        ("test", ((7, 3),)),
        ("test", None),
    ]
    assert [status.begin_step(b) for b in batches] == [True, False, True, True, True]
    assert status.answer({"kind": "step", "number": 3})["step"] == "train on (7, 3)"
    assert status.answer({"kind": "step", "number": 5})["step"] == "test: the end of the data"
    answer = {"kind": "step", "reached": False, "step": None, "steps": 5, "finished": False}
    assert status.answer({"kind": "step", "number": 6}) == answer


@pytest.mark.parametrize("number", [None, "1", -1, 0])
def test_batches_that_nobody_has(number):
    status = WorkerStatus()
    status.begin_step(("train", ((8,),)))
    assert status.answer({"kind": "step", "number": number})["step"] is None


def test_old_batches_are_forgotten():
    status = WorkerStatus()
    for _ in range(300):
        status.begin_step(("train", ((8,),)))
    first = status.answer({"kind": "step", "number": 1})
    assert (first["reached"], first["step"]) == (True, None)
    assert status.answer({"kind": "step", "number": 300})["step"] == describe_step(("train", ((8,),)))


def test_the_first_word_counts():
    status = WorkerStatus()
    for text in ("first", "second"):
        status.answer({"kind": "abort", "reason": text})
    assert status.abort_reason == "first"


@pytest.mark.parametrize(
    ("path", "begun", "done"), [("a", 2, True), ("b", 2, False), ("a", 1, True), ("a", 3, False)]
)
def test_a_file_is_noted_with_the_collectives_before_it(path, begun, done):
    status = WorkerStatus(collectives_begun=2)
    status.note_file("a")
    assert status.answer({"kind": "file", "path": path, "collectives_begun": begun})["done"] is done
    status.is_finished = True
    assert status.answer({"kind": "file", "path": path, "collectives_begun": begun})["done"]


@pytest.mark.parametrize(
    ("series", "index", "begun", "done", "number"),
    [
        ("a", 0, 2, True, 7),
        ("a", 1, 2, True, 9),
        ("a", 2, 2, False, None),
        ("a", 2, 1, True, None),
        ("b", 0, 2, False, None),
        ("a", None, 2, False, None),
    ],
)
def test_a_checkpoint_is_numbered_or_will_not_be(series, index, begun, done, number):
    status = WorkerStatus(collectives_begun=2)
    for given in (7, 9):
        status.note_number("a", given)
    question = {"kind": "checkpoint_number", "series": series, "index": index, "collectives_begun": begun}
    assert status.answer(question) == {"kind": "checkpoint_number", "done": done, "number": number}
