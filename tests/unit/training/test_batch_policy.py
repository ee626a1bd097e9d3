"""The closed list of layers that may see batches that are filled up: each is tested, one by one.

The trace of each is read, and its result for a row must not change with the rows behind it.
"""

import jax
import keras
import numpy as np
import pytest

from unisono.training.groups._batch_policy import (
    ROW_WISE,
    BatchPolicy,
    Mode,
    depends_on_batch,
    one_batch_size,
)
from unisono.training.replica._row_analysis import RowUse, row_uses

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
#: Their traces are not read to the end.
UNREAD = (L.ConvLSTM1D, L.ConvLSTM2D, L.ConvLSTM3D)


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
    if cls not in UNREAD:
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


class Own(L.Dense):
    pass


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: model_of(L.BatchNormalization()), "may mix rows"),
        (lambda: model_of(L.Lambda(lambda x: x)), "may mix rows"),
        (lambda: model_of(Own(3)), "may mix rows"),
        (lambda: model_of(L.RNN(_OwnCell(2)), shape=SERIES), "may mix rows"),
        (lambda: model_of(L.Softmax(axis=0)), "batch among its axes"),
        (lambda: model_of(L.Softmax(axis=-2)), "batch among its axes"),
        (lambda: model_of(L.Embedding(9, 2, mask_zero=True)), "makes a mask"),
        (lambda: model_of(L.Dense(2, activity_regularizer="l2")), "activity regularizer"),
    ],
)
def test_other_layers_may_mix_rows(model, why):
    assert why in depends_on_batch(model())


class _OwnCell(L.SimpleRNNCell):
    pass


@pytest.mark.parametrize("name", ["JaxLayer", "FlaxLayer", "TorchModuleWrapper", "Lambda", "MixUp", "CutMix"])
def test_foreign_code_is_not_on_the_list(name):
    assert getattr(L, name) not in ROW_WISE


def test_models_for_one_batch_size():
    assert one_batch_size(model_of(L.Dense(2))) is None
    assert "takes 12 rows" in one_batch_size(keras.Sequential([keras.Input(batch_shape=(12, 6)), L.Dense(2)]))
    stateful = keras.Sequential([keras.Input(batch_shape=(4, 5, 4)), L.LSTM(2, stateful=True)])
    assert "4 rows" in one_batch_size(stateful) or "keeps a state" in one_batch_size(stateful)


def test_what_concerns_a_model_is_said_once_for_it(caplog):
    """Not by each of its functions, and not again after `compile`."""
    models = [keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization()]) for _ in range(2)]
    for model in (*models, *models):
        assert BatchPolicy(model, 2).mode(11) is Mode.WHOLE
    assert [r.getMessage().partition(",")[0] for r in caplog.records] == [
        "A batch of 11 rows does not divide over 2 replicas"
    ] * 2


def test_batches_of_many_shapes_are_named_once(caplog):
    model = keras.Sequential([keras.layers.GlobalAveragePooling1D()])
    few = [(rows, length) for rows in range(1, 40) for length in range(15)]
    many = [(4, length) for length in range(40)]
    for shapes, warnings in [(few, 0), (many, 1), (many, 1)]:
        policy = BatchPolicy(model, 2)
        for rows, length in shapes:
            policy.note_shapes((np.ones((rows, length, 1)), np.ones(rows)))
        assert len(caplog.records) == warnings
    (record,) = caplog.records
    assert "16 shapes of rows" in record.getMessage()
    assert "padded_shapes=([128], [])" in record.getMessage()
