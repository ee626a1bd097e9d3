"""Which rows a step needs, from where they come, and where their gradients go."""

import dataclasses
import json
from concurrent.futures import Future

import numpy as np
import pytest

from unisono.parameter_server.worker._table_rows import (
    NO_PLACE,
    GroupPlan,
    LookupPlan,
    RowNumbers,
    RowPush,
    TablePart,
    TablePlan,
    TableRows,
    pushed_rows,
)

#: Ten rows, of which server 1 has the first four.
PARTS = (TablePart(1, 5, 0, 4), TablePart(0, 7, 4, 10))


def plan(*sites, tables=1):
    table = TablePlan(PARTS, (2,), "float32")
    return LookupPlan("ids", (0,), (GroupPlan(10, (table,) * tables),), sites)


class Tables:
    """Servers whose rows hold their numbers, in all elements."""

    def __init__(self):
        self.asked = []

    def rows(self, keys, indices):
        numbers = [number for _, number, *_ in keys]
        self.asked.append((keys[0][0], numbers, [i.tolist() for i in indices]))
        begin = {part.number: part.begin for part in PARTS}
        answer = Future()
        found = [np.repeat((i + begin[n])[:, None], 2, 1) for n, i in zip(numbers, indices, strict=True)]
        answer.set_result([f.astype("float32") for f in found])
        return answer


def test_each_row_is_asked_for_once_and_lookups_get_their_places():
    tables, lookups = Tables(), plan((0, False), (0, False))
    found = [np.array([[9, 2], [2, 4]], "int32"), np.array([0], "int64")]
    numbers = RowNumbers(lookups, found)
    rows, used, *places = TableRows(tables.rows).pull(lookups, numbers)
    assert tables.asked == [(1, [5], [[0, 2]]), (0, [7], [[0, 5]])]
    assert rows[:4, 0].tolist() == [0, 2, 4, 9]
    assert not rows[4:].any()
    assert int(used) == 4
    for ids, place in zip(found, places, strict=True):
        assert place.dtype == np.int32
        np.testing.assert_array_equal(rows[place][..., 1], ids)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "uint32"])
def test_numbers_that_are_none_of_a_row(dtype):
    wild = np.array([3, 10, 100, 3], dtype)
    wild = np.concatenate([wild, np.array([-1], dtype)]) if dtype.startswith("i") else wild
    numbers = RowNumbers(plan((0, False)), [wild])
    assert numbers.rows[0].tolist() == [3]
    assert numbers.places[0].tolist() == [0, NO_PLACE, NO_PLACE, 0, NO_PLACE][: len(wild)]
    clamped = RowNumbers(plan((0, True)), [wild])
    assert clamped.rows[0][clamped.places[0]].tolist() == [3, 9, 9, 3, 0][: len(wild)]


def test_rounded_rows_become_those_of_the_table():
    lookups, asked = plan((0, False)), []
    table = dataclasses.replace(lookups.groups[0].tables[0], rounded="float16")
    lookups = dataclasses.replace(lookups, groups=(GroupPlan(10, (table,)),))

    def rows(keys, indices):
        asked.extend(keys)
        answer = Future()
        answer.set_result([np.full((len(i), 2), 0.1, "float16") for i in indices])
        return answer

    numbers = RowNumbers(lookups, [np.array([1, 8])])
    found = TableRows(rows).pull(lookups, numbers)[0]
    assert asked == [(1, 5, "float16"), (0, 7, "float16")]
    assert found.dtype == np.float32
    assert found[:2].tolist() == [[float(np.float16(0.1))] * 2] * 2


def test_empty_batches_ask_for_nothing():
    tables, lookups = Tables(), plan((0, False))
    numbers = RowNumbers(lookups, [np.zeros((0, 3), "int32")])
    rows, used, places = TableRows(tables.rows).pull(lookups, numbers)
    assert tables.asked == []
    assert (rows.shape, int(used), places.shape) == ((8, 2), 0, (0, 3))
    push = [RowPush(0, 0, 4, (0,)), RowPush(0, 4, 10, (0,))]
    assert pushed_rows(push, numbers, [rows], ["a", "b", "all else"]) == ([], ["all else"])


def test_tables_of_one_group_come_with_one_request_of_each_server():
    tables, lookups = Tables(), plan((0, False), tables=2)
    TableRows(tables.rows).pull(lookups, RowNumbers(lookups, [np.array([1, 8])]))
    assert tables.asked == [(1, [5, 5], [[1], [1]]), (0, [7, 7], [[4], [4]])]


def test_the_number_of_places_is_a_power_of_two_and_does_not_become_smaller():
    table = TablePlan((TablePart(0, 7, 0, 1000),), (2,), "float32")
    lookups = LookupPlan("ids", (0,), (GroupPlan(1000, (table,)),), ((0, False),))
    rows = TableRows(lambda keys, indices: Tables().rows(keys, indices))
    counts = []
    for ids in (np.arange(3), np.arange(100), np.arange(9), np.arange(129), np.zeros(800, int)):
        counts.append(len(rows.pull(lookups, RowNumbers(lookups, [ids]))[0]))
    assert counts == [8, 128, 128, 256, 256]


def test_gradients_go_to_the_servers_of_their_rows():
    numbers = RowNumbers(plan((0, False)), [np.array([8, 1, 3, 8])])
    gradient, flag = np.arange(16.0).reshape(8, 2), np.array(True)
    pushes = [RowPush(0, 0, 4, (0, 1)), RowPush(0, 4, 10, (0, 1))]
    arrays, told = pushed_rows(pushes, numbers, [gradient, flag], ["first", "second", "else"])
    assert [a.tolist() for a in arrays[:3]] == [[1, 3], [[0, 1], [2, 3]], [True, True]]
    assert [a.tolist() for a in arrays[3:]] == [[4], [[4, 5]], [True]]
    assert told == ["first", "second", "else"]
    # One whose rows are all elsewhere is not updated.
    low = RowNumbers(plan((0, False)), [np.array([1])])
    assert pushed_rows(pushes, low, [gradient, flag], ["first", "second", "else"])[1] == ["first", "else"]


def test_a_gradient_of_the_whole_table_goes_to_all_rows():
    arrays, told = pushed_rows([RowPush(-1, 4, 10, (0,))], None, [np.arange(10.0)], ["table"])
    assert [a.tolist() for a in arrays] == [[0, 1, 2, 3, 4, 5], [4, 5, 6, 7, 8, 9]]
    assert told == ["table"]


def test_a_plan_travels_as_json():
    sent = plan((0, False), (0, True), tables=2)
    assert LookupPlan.from_meta(json.loads(json.dumps(dataclasses.asdict(sent)))) == sent
