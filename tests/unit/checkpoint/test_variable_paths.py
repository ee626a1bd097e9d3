"""Names of variables depend on the model alone."""

import pytest

from unisono.checkpoint._variable_paths import canonical_paths, slot_names


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["dense/kernel", "dense_1/kernel"], ["dense/kernel", "dense_1/kernel"]),
        (["dense_7/kernel", "dense_9/kernel"], ["dense/kernel", "dense_1/kernel"]),
        (["dense_9/kernel", "dense_7/kernel"], ["dense/kernel", "dense_1/kernel"]),
        (["a_3/dense_1/w", "a_4/dense_2/w"], ["a/dense/w", "a_1/dense/w"]),
        (["encoder/w", "decoder/w"], ["encoder/w", "decoder/w"]),
        (["d/w", "d/w"], ["d/w", "d/w#2"]),
        ([], []),
    ],
)
def test_canonical_paths(paths, expected):
    assert canonical_paths(paths) == expected
    assert len(set(expected)) == len(paths)


def test_a_second_model_of_a_process_has_the_names_of_the_first():
    first = ["sequential/dense/kernel", "sequential/dense/bias", "sequential/dense_1/kernel"]
    second = ["sequential_1/dense_2/kernel", "sequential_1/dense_2/bias", "sequential_1/dense_3/kernel"]
    assert canonical_paths(first) == canonical_paths(second)


def test_slots_are_named_by_their_weights_and_the_longest_name_wins():
    references = {"dense_1/kernel": "dense/kernel", "dense_1/kernel/lora": "dense/lora"}
    names = ["iteration", "dense_1_kernel_momentum", "dense_1_kernel_lora_momentum", "other"]
    assert slot_names(names, references) == [
        "iteration", "dense/kernel/momentum", "dense/lora/momentum", "other",
    ]  # fmt: skip
