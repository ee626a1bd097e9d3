"""The page on `MirroredStrategy`: variables, and the loop over a distributed dataset.

The cluster of its last lines is in tests/cluster/test_seed_programs.py.
"""

import re

import jax
import pytest

import unisono
from tests.virtual.seeds import documents
from tests.virtual.seeds.programs import run

#: There are no GPUs here.
CPUS = {"GPU:": "CPU:"}


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        program = documents.MIRRORED_VARIABLE + documents.MIRRORED_LOOP
        return run(program, patch, tmp_path_factory.mktemp("seed"), CPUS)


@pytest.mark.parametrize("name", ["variable", "created"])
def test_a_variable_is_shown_as_on_the_page(names, name):
    assert re.fullmatch(documents.SHOWN_VARIABLE, repr(names[name]))


def test_a_function_that_runs_again_gives_the_same_variable(names):
    with names["strategy"].scope():
        assert float(names["create_variable"]()) == 1.0
    assert names["x"] == [names["created"]]


def test_the_loop_counts_every_example_in_each_epoch(names):
    assert names["my_strategy"].num_replicas_in_sync == jax.local_device_count()
    assert [result.numpy() for result in names["results"]] == [21, 21]


def test_the_arguments_and_the_resolver(names):
    assert isinstance(names["with_ops"].cross_device_ops, unisono.HierarchicalCopyAllReduce)
    assert names["my_strategy"].cluster_resolver is None
