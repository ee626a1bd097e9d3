"""The datasets of a worker: batches taken once, given back, and found again after a restart."""

import cloudpickle
import numpy as np
import pytest

from unisono._errors import OutOfRangeError
from unisono.parameter_server.worker._worker_data import WorkerData
from unisono.rpc._frames import Frame, blob
from unisono.rpc._ops import Op


def data_of(function, worker=1, used=(0,)):
    data = WorkerData(worker, 3)
    data.change(Frame(Op.DATASET, meta={"make": "d"}, arrays=[blob(cloudpickle.dumps(function))]))
    data.change(Frame(Op.DATASET, meta={"iterate": "i", "of": "d", "used": used}))
    return data


def test_the_function_gets_the_workers_number():
    data = data_of(lambda context: [(context.input_pipeline_id, context.num_input_pipelines)])
    assert data.take(["i"]).batches == ((1, 3),)


def test_batches_that_were_given_back_come_again_in_order():
    data = data_of(lambda context: range(5))
    taken = data.take(["i", "i"])
    assert taken.batches == (0, 1)
    assert taken.numbers == {"i": [1, 2]}
    taken.give_back()
    assert taken.numbers == {}
    assert data.take(["i", "i", "i"]).batches == (0, 1, 2)


def test_a_restarted_worker_goes_on_behind_what_was_used():
    data = data_of(lambda context: np.arange(6), used=(4,))
    taken = data.take(["i"])
    assert taken.batches == (4,)
    assert taken.numbers == {"i": [5]}


def test_a_restarted_worker_begins_with_what_was_left_out():
    data = data_of(lambda context: np.arange(6), used=(5, 2, 4))
    taken = data.take(["i", "i", "i"])
    assert taken.batches == (1, 3, 5)
    assert taken.numbers == {"i": [2, 4, 6]}
    taken.give_back()
    assert data.take(["i"]).numbers == {"i": [2]}


def test_at_the_end_of_the_data_nothing_is_lost():
    data = data_of(lambda context: [7])
    data.change(Frame(Op.DATASET, meta={"iterate": "j", "of": "d"}))
    with pytest.raises(OutOfRangeError, match=r"end of the data on worker 1 after 1 batches"):
        data.take(["j", "i", "i"])
    assert data.take(["i", "j"]).batches == (7, 7)
    assert data.take([]).parts == []


def test_iterators_are_forgotten():
    data = data_of(lambda context: [7])
    data.change(Frame(Op.DATASET, meta={"forget": ["i"]}))
    with pytest.raises(KeyError):
        data.take(["i"])
