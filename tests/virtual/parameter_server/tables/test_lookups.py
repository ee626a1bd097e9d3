"""Which tables of a step are used by rows, and the step's two programs."""

import jax
import keras
import numpy as np

from tests.virtual.parameter_server.chief._dict_cluster import DictStrategy, loaded
from unisono.parameter_server.programs._worker_program import Destination
from unisono.parameter_server.programs._worker_step import WorkerStep
from unisono.parameter_server.worker._table_rows import NO_PLACE
from unisono.training.trainer._trainer_step import TrainerTask


def built(call, optimizer="sgd"):
    """Return a model of two tables of 20 rows and one of 30, and its program for batches of 4 rows."""

    class Tables(keras.Model):
        def __init__(self):
            super().__init__()
            self.one, self.two = keras.layers.Embedding(20, 2), keras.layers.Embedding(20, 3)
            self.other, self.out = keras.layers.Embedding(30, 2), keras.layers.Dense(1)
            for layer in (self.one, self.two, self.other):
                layer.build()

        def call(self, x):
            return self.out(call(self, x))

    strategy = DictStrategy()
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = Tables()
        model.compile(optimizer, "mse")
    batch = np.arange(8, dtype="int32").reshape(4, 2), np.ones((4, 1), "float32")
    model(batch[0])
    model.optimizer.build(model.trainable_variables)
    tables = {id(layer.embeddings) for layer in (model.one, model.two, model.other)}
    step = WorkerStep(
        model, strategy._replicas, TrainerTask.TRAIN, Destination(lambda v, optimizer: id(v) in tables)
    )
    return model, step.program(batch), batch


def paths(program):
    return [sorted(v.path.split("/")[-2] for v in group.tables) for group in program.lookups.groups]


def joined(*parts):
    return keras.ops.concatenate(parts, axis=-1)


def test_each_table_has_its_rows_and_tables_looked_up_alike_share_them():
    _, program, _ = built(lambda m, x: joined(m.one(x[:, 0]), m.two(x[:, 1]), m.other(x[:, 0] % 7)))
    assert [g.size for g in program.lookups.groups] == [20, 20, 30]
    assert [group for group, _ in program.lookups.sites] == [0, 1, 2]
    assert {id(v) for v in program.tables}.isdisjoint(map(id, program.reads))
    assert {id(v) for v in program.tables} <= {id(v) for _, v in program.gradients}
    _, together, _ = built(
        lambda m, x: keras.ops.take(joined(m.one.embeddings, m.two.embeddings), x[:, 0], axis=0)
    )
    # Of a concatenation all rows are needed: it is not known.
    assert together.lookups is None


def test_a_table_that_is_needed_as_a_whole_is_so_alone(caplog):
    def call(model, x):
        found = model.one(x[:, 0])
        return joined(found @ keras.ops.transpose(model.one.embeddings), model.two(x[:, 1]))

    model, program, _ = built(call)
    assert [id(v) for v in program.tables] == [id(model.two.embeddings)]
    assert any(v is model.one.embeddings for v in program.reads)
    assert "uses all of the table" in caplog.text
    assert model.one.embeddings.path in caplog.text


def test_programs_give_rows_and_their_gradients():
    model, program, (x, y) = built(lambda m, x: m.other(x[:, 0]))
    lookups = program.lookups
    given = [*(np.asarray(v.value) for v in program.reads), *([x, y][i] for i in program.arrays)]
    (numbers,) = loaded(lookups.blob)(*(given[i] for i in lookups.takes))
    np.testing.assert_array_equal(np.ravel(numbers), [0, 2, 4, 6])
    table = np.asarray(model.other.embeddings.value)
    rows = np.concatenate([table[[0, 2, 4, 6]], np.zeros((4, 2), "float32")])
    found = loaded(program.blob)(*given, rows, np.int32(4), np.arange(4, dtype="int32").reshape(4, 1))
    gradients = {id(v): g for (_, v), g in zip(program.gradients, found, strict=False)}
    expected = jax.grad(
        lambda t: keras.ops.mean(
            (keras.ops.take(t, x[:, 0], axis=0) @ model.out.kernel.value + model.out.bias.value - y) ** 2
        )
    )(table)
    np.testing.assert_allclose(gradients[id(model.other.embeddings)][:4], expected[::2][:4], rtol=1e-6)
    assert not gradients[id(model.other.embeddings)][4:].any()
    # A number that is none of a row has no place: NaN, as on one device.
    places = np.array([[0], [NO_PLACE], [1], [2]], "int32")
    assert np.isnan(loaded(program.blob)(*given, rows, np.int32(3), places)[-1]).all()
