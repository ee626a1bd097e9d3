"""How batches reach the replicas, and Keras' layers whose rows are apart.

The trace of each layer is read, and its result for a row must not change with the rows behind it.
"""

import logging

import jax
import keras
import numpy as np
import pytest

from unisono._errors import InvalidArgumentError
from unisono.training.groups._batch_policy import BatchPolicy, Mode, one_batch_size
from unisono.training.replica._step_reading import StepReading
from unisono.training.rows._row_analysis import RowUse, row_uses

L = keras.layers
VECTOR, SERIES, IMAGE, VOLUME = (6,), (5, 4), (6, 6, 4), (4, 4, 4, 2)


def default(*args, **kwargs):
    return lambda cls: cls(*args, **kwargs)


#: How each layer is made, and the shapes of its inputs without rows.
MADE = {
    L.InputLayer: (lambda cls: cls(VECTOR), [VECTOR]),
    L.Reshape: (default((2, 3)), [VECTOR]),
    L.Permute: (default((2, 1)), [SERIES]),
    L.RepeatVector: (default(2), [VECTOR]),
    L.Dense: (default(3), [VECTOR]),
    L.EinsumDense: (default("abc,cd->abd", (None, 3)), [SERIES]),
    L.Embedding: (default(9, 3), [SERIES]),
    L.ReversibleEmbedding: (default(9, 3), [SERIES]),
    L.Activation: (default("tanh"), [VECTOR]),
    L.Rescaling: (default(2.0), [VECTOR]),
    L.Normalization: (default(mean=1.0, variance=2.0), [VECTOR]),
    L.SpectralNormalization: (lambda cls: cls(L.Dense(3)), [VECTOR]),
    L.TimeDistributed: (lambda cls: cls(L.Dense(3)), [SERIES]),
    L.Bidirectional: (lambda cls: cls(L.GRU(3)), [SERIES]),
    L.RNN: (lambda cls: cls(L.GRUCell(3)), [SERIES]),
    L.StackedRNNCells: (lambda cls: L.RNN(cls([L.LSTMCell(3), L.GRUCell(2)])), [SERIES]),
    L.MultiHeadAttention: (default(2, 3), [SERIES, SERIES]),
    L.GroupQueryAttention: (default(3, 2, 1), [SERIES, SERIES]),
    L.GroupNormalization: (default(2), [IMAGE]),
    L.Resizing: (default(4, 4), [IMAGE]),
    L.CenterCrop: (default(4, 4), [IMAGE]),
    L.Dot: (default(axes=1), [VECTOR, VECTOR]),
    L.Concatenate: (default(), [VECTOR, VECTOR]),
    L.ConvLSTM1D: (default(2, 3), [IMAGE]),
    L.ConvLSTM2D: (default(2, 3), [VOLUME]),
    L.ConvLSTM3D: (default(2, 3), [(2, *VOLUME)]),
}
for cell in (L.SimpleRNNCell, L.LSTMCell, L.GRUCell):
    MADE[cell] = (lambda cls: L.RNN(cls(3)), [SERIES])
for layer in (L.SimpleRNN, L.LSTM, L.GRU):
    MADE[layer] = (default(3), [SERIES])
for layer in (L.Attention, L.AdditiveAttention):
    MADE[layer] = (default(), [SERIES, SERIES])
for layer in (L.Add, L.Subtract, L.Multiply, L.Average, L.Maximum, L.Minimum):
    MADE[layer] = (default(), [VECTOR, VECTOR])
for layer in (L.Dropout, L.AlphaDropout, L.GaussianDropout, L.GaussianNoise):
    MADE[layer] = (default(0.5), [SERIES])
DIMENSIONS = {"1D": SERIES, "2D": IMAGE, "3D": VOLUME}
#: Keras' own layers whose result for a row depends on this row alone, where no axis is the batch's.
ROW_WISE = frozenset(
    {
        *(L.InputLayer, L.Identity, L.Flatten, L.Reshape, L.Permute, L.RepeatVector),
        *(L.Dense, L.EinsumDense, L.Embedding, L.Activation, L.ReLU, L.LeakyReLU, L.PReLU, L.ELU),
        *(L.Softmax, L.Rescaling, L.Normalization, L.SpectralNormalization),
        *(L.Conv1D, L.Conv2D, L.Conv3D, L.Conv1DTranspose, L.Conv2DTranspose, L.Conv3DTranspose),
        *(L.DepthwiseConv1D, L.DepthwiseConv2D, L.SeparableConv1D, L.SeparableConv2D),
        *(L.MaxPooling1D, L.MaxPooling2D, L.MaxPooling3D),
        *(L.AveragePooling1D, L.AveragePooling2D, L.AveragePooling3D),
        *(L.GlobalMaxPooling1D, L.GlobalMaxPooling2D, L.GlobalMaxPooling3D),
        *(L.GlobalAveragePooling1D, L.GlobalAveragePooling2D, L.GlobalAveragePooling3D),
        *(L.ZeroPadding1D, L.ZeroPadding2D, L.ZeroPadding3D, L.Resizing, L.CenterCrop),
        *(L.Cropping1D, L.Cropping2D, L.Cropping3D, L.UpSampling1D, L.UpSampling2D, L.UpSampling3D),
        *(L.LayerNormalization, L.RMSNormalization, L.GroupNormalization, L.UnitNormalization),
        *(L.Dropout, L.SpatialDropout1D, L.SpatialDropout2D, L.SpatialDropout3D),
        *(L.AlphaDropout, L.GaussianDropout, L.GaussianNoise),
        *(L.SimpleRNN, L.LSTM, L.GRU, L.ConvLSTM1D, L.ConvLSTM2D, L.ConvLSTM3D, L.RNN),
        *(L.SimpleRNNCell, L.LSTMCell, L.GRUCell, L.StackedRNNCells, L.Bidirectional),
        *(L.TimeDistributed, L.MultiHeadAttention, L.GroupQueryAttention, L.Attention),
        *(L.AdditiveAttention, L.Add, L.Subtract, L.Multiply, L.Average, L.Maximum, L.Minimum),
        *(L.Concatenate, L.Dot, L.ReversibleEmbedding, L.BatchNormalization),
    }
)


def made(cls):
    if cls in MADE:
        make, shapes = MADE[cls]
        return make(cls), shapes
    name = cls.__name__
    shapes = [next((shape for n, shape in DIMENSIONS.items() if n in name), VECTOR)]
    if "SpatialDropout" in name:
        return cls(0.5), shapes
    if "Pooling" in name and "Global" not in name:
        return cls(2), shapes
    if "DepthwiseConv" in name:
        return cls(2), shapes
    if "Conv" in name:
        return cls(3, 2), shapes
    return cls(), shapes


@pytest.mark.parametrize("cls", sorted(ROW_WISE, key=lambda c: c.__name__), ids=lambda c: c.__name__)
def test_rows_do_not_meet(cls):
    layer, shapes = made(cls)
    if isinstance(layer, L.InputLayer):
        return  # it holds a shape and computes nothing
    inputs = [_rows(shape, "Embedding" in cls.__name__) for shape in shapes]
    call = _call_of(layer)
    call(*[keras.KerasTensor(x.shape, str(x.dtype)) for x in inputs])  # makes the weights
    call = jax.jit(call)
    whole = np.asarray(call(*inputs))
    assert set(row_uses(call, tuple(inputs), 3, 6)) == {RowUse.APART}
    filled = [np.concatenate([x[:3], x[2:3]]) for x in inputs]
    np.testing.assert_allclose(np.asarray(call(*filled))[:3], whole[:3], rtol=1e-5, atol=1e-6)


def _call_of(layer):
    if isinstance(layer, (L.MultiHeadAttention, L.GroupQueryAttention)):
        return lambda a, b: layer(a, b)
    return lambda *arrays: layer(arrays[0] if len(arrays) == 1 else list(arrays))


def _rows(shape, integers):
    rng = np.random.default_rng(0)
    return rng.integers(0, 9, (6, *shape)) if integers else rng.normal(size=(6, *shape)).astype("f4")


def model_of(*layers, shape=VECTOR):
    return keras.Sequential([keras.Input(shape), *layers])


def test_models_for_one_batch_size():
    assert one_batch_size(model_of(L.Dense(2))) is None
    assert "takes 12 rows" in one_batch_size(keras.Sequential([keras.Input(batch_shape=(12, 6)), L.Dense(2)]))
    stateful = keras.Sequential([keras.Input(batch_shape=(4, 5, 4)), L.LSTM(2, stateful=True)])
    assert "4 rows" in one_batch_size(stateful) or "keeps a state" in one_batch_size(stateful)


def modes(sizes, reading, replicas=2, joins=False):
    """The modes of batches of these sizes in one call."""
    policy = BatchPolicy(model_of(L.Dense(2)), replicas, lambda _: reading, joins)
    return [policy.mode(None, rows) for rows in sizes]


APART = StepReading(unfillable="")
NORMALIZES = StepReading(apart=("normalization",), unfillable="it normalizes")


@pytest.mark.parametrize(
    ("sizes", "reading", "expected"),
    [
        ([12, 12, 7], APART, [Mode.SPLIT, Mode.SPLIT, Mode.WHOLE]),
        ([12, 2], APART, [Mode.SPLIT, Mode.SPLIT]),
        ([11, 11, 4, 3], APART, [Mode.PADDED, Mode.PADDED, Mode.SPLIT, Mode.WHOLE]),
        ([1], APART, [Mode.WHOLE]),
        ([11, 2], StepReading(unfillable="a mask"), [Mode.WHOLE, Mode.SPLIT]),
        # A part of 1 or 2 rows is no statistic, nor is the half of the others.
        ([25, 25, 2], NORMALIZES, [Mode.WHOLE, Mode.WHOLE, Mode.WHOLE]),
        ([12, 4, 6, 8], NORMALIZES, [Mode.SPLIT, Mode.WHOLE, Mode.WHOLE, Mode.SPLIT]),
        ([4, 4, 2], NORMALIZES, [Mode.SPLIT, Mode.SPLIT, Mode.WHOLE]),
        ([2, 2, 4], NORMALIZES, [Mode.SPLIT, Mode.SPLIT, Mode.SPLIT]),
    ],
)
def test_modes(sizes, reading, expected):
    assert modes(sizes, reading) == expected


def test_rows_that_depend_on_each_other_are_computed_together():
    mixes = StepReading(mixes="output relates rows")
    assert modes([12, 7, 2], mixes) == [Mode.WHOLE] * 3
    assert modes([12, 7, 2], mixes, joins=True) == [Mode.JOINED, Mode.WHOLE, Mode.JOINED]
    assert modes([12, 7], mixes, replicas=1) == [Mode.SPLIT] * 2


def test_a_batch_of_another_size_is_read_anew():
    """A layer may branch on the number of rows: what holds for the first batch need not for the last."""
    readings = {12: APART, 8: StepReading(mixes="the mean of few rows"), 7: NORMALIZES}
    read = []

    def reading(batch):
        read.append(len(batch))
        return readings[len(batch)]

    policy = BatchPolicy(model_of(L.Dense(2)), 2, reading, joins=True)
    modes = [policy.mode(np.zeros(rows), rows) for rows in (12, 12, 8, 12, 8, 7)]
    split, joined = Mode.SPLIT, Mode.JOINED
    assert modes == [split, split, joined, split, joined, Mode.WHOLE]
    assert read == [12, 8]
    # In another call it is the usual size.
    policy.usual_rows = None
    assert policy.mode(np.zeros(7), 7) is Mode.WHOLE
    assert read == [12, 8, 7]
    # What is said of few rows holds for them alone.
    policy = BatchPolicy(model_of(L.Dense(2)), 2, reading, joins=True)
    assert [policy.mode(np.zeros(rows), rows) for rows in (8, 12)] == [Mode.JOINED, Mode.SPLIT]


def test_what_concerns_a_model_is_said_once_for_it(caplog):
    """Not by each of its functions, not again after `compile`, and not for each size."""
    models = [model_of(L.Dense(2)) for _ in range(2)]
    for rows, model in enumerate((*models, *models)):
        assert BatchPolicy(model, 2, lambda _: NORMALIZES).mode(None, 11 + 2 * rows) is Mode.WHOLE
    assert [r.getMessage().partition(",")[0] for r in caplog.records] == [
        f"A batch of {rows} rows does not divide over 2 replicas" for rows in (11, 13)
    ]


def test_training_and_validation_with_different_causes_are_one_warning(caplog):
    model = model_of(L.Dense(2))
    graph = {"edges": np.zeros((6, 2)), "nodes": np.zeros((4, 3))}
    assert BatchPolicy(model, 2, lambda _: StepReading(mixes="a queue")).mode(None, 12) is Mode.WHOLE
    assert BatchPolicy(model, 2, lambda _: NORMALIZES).mode(None, 11) is Mode.WHOLE
    assert BatchPolicy(model, 2, lambda _: APART).mode_of(graph) == (Mode.WHOLE, 0)
    (record,) = caplog.records
    assert "cannot be computed apart: a queue" in record.getMessage()


@pytest.mark.parametrize(
    ("reading", "text"),
    [
        (NORMALIZES, "'normalization' sees the rows of one replica alone"),
        (StepReading(draws=("a", "b", "c")), "'a' and 2 more draw random numbers per replica"),
        (StepReading(mixes="a queue"), "cannot be computed apart: a queue"),
    ],
)
def test_what_differs_from_one_device_or_costs_speed_is_said(reading, text, caplog):
    modes([12, 12], reading)
    (record,) = caplog.records
    assert text in record.getMessage()


def test_a_last_batch_that_is_computed_together_is_no_second_warning(caplog):
    readings = {12: NORMALIZES, 8: StepReading(mixes="the mean of few rows")}
    policy = BatchPolicy(model_of(L.Dense(2)), 2, lambda batch: readings[len(batch)], joins=True)
    assert [policy.mode(np.zeros(rows), rows) for rows in (12, 8)] == [Mode.SPLIT, Mode.JOINED]
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "differs from one device" in record.getMessage()


def test_batches_of_unequal_arrays_are_computed_by_every_replica(caplog):
    """Nodes and edges of merged graphs; also where both happen to be as many."""
    policy = BatchPolicy(model_of(L.Dense(2)), 2, lambda _: APART)
    nodes, edges = np.zeros((4, 3)), np.zeros((6, 2))
    assert policy.mode_of({"x": nodes, "y": nodes}) == (Mode.SPLIT, 4)
    assert policy.mode_of({"edges": edges, "nodes": nodes}) == (Mode.WHOLE, 0)
    assert policy.mode_of({"edges": nodes, "nodes": nodes}) == (Mode.WHOLE, 0)
    (record,) = caplog.records
    assert "shape (6, 2) at batch['edges'], and (4, 3) at batch['nodes']" in record.getMessage()
    with pytest.raises(InvalidArgumentError, match="Did you forget"):
        BatchPolicy(model_of(L.Dense(2)), 2, lambda _: APART).mode_of((nodes, 1.0))


def test_batches_of_many_shapes_are_named_once(caplog):
    model = keras.Sequential([keras.layers.GlobalAveragePooling1D()])
    few = [(rows, length) for rows in range(1, 40) for length in range(15)]
    many = [(4, length) for length in range(40)]
    for shapes, warnings in [(few, 0), (many, 1), (many, 1)]:
        policy = BatchPolicy(model, 2, lambda _: APART)
        for rows, length in shapes:
            policy.note_shapes((np.ones((rows, length, 1)), np.ones(rows)))
        assert len(caplog.records) == warnings
    (record,) = caplog.records
    assert "16 shapes of rows" in record.getMessage()
    assert "padded_shapes=([128], [])" in record.getMessage()
