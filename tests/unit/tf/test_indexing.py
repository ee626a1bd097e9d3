"""Operations at indices and of matrices, against NumPy."""

import numpy as np
import pytest

from unisono import tf

X = np.arange(12.0, dtype="float32").reshape(3, 4)


def test_sizes_are_numbers_while_a_function_is_traced():
    @tf.function
    def mean(x):
        return tf.reduce_sum(x) / tf.cast(tf.size(x), tf.float32), tf.ones((tf.rank(x), tf.size(x)))

    total, ones = mean(tf.constant(X))
    assert float(total) == X.mean()
    assert ones.shape == (2, 12)
    assert tf.size(X).numpy() == 12
    assert tf.rank([[1]]).numpy() == 2
    assert tf.size(tf.keras.Input((3,), 2)).shape == ()


def test_entries_at_indices():
    rows = np.array([[0, 1], [2, 3]])
    np.testing.assert_array_equal(tf.gather_nd(X, rows), X[[0, 2], [1, 3]])
    np.testing.assert_array_equal(tf.gather_nd(X, [[1]]), X[[1]])
    np.testing.assert_array_equal(tf.gather_nd(X, [[0], [1], [3]], batch_dims=1), X[[0, 1, 2], [0, 1, 3]])
    np.testing.assert_array_equal(tf.scatter_nd([[0], [0]], [[1, 2], [3, 4]], [2, 2]), [[4, 6], [0, 0]])


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("update", [9, 2]), ("add", [10, 2]), ("sub", [-8, 2]), ("max", [9, 2]), ("min", [1, 2])],
)
def test_tensors_with_changed_entries(name, wanted):
    given = tf.constant([1, 2])
    changed = getattr(tf, f"tensor_scatter_nd_{name}")(given, [[0]], [9])
    assert changed.tolist() == wanted
    assert given.tolist() == [1, 2]


def test_matrices():
    square = np.array([[2, 1], [1, 3]], "float32")
    np.testing.assert_allclose(tf.linalg.matvec(square, [1.0, 2.0]), square @ [1, 2])
    np.testing.assert_allclose(tf.linalg.matvec(X, [1.0, 2.0, 3.0], transpose_a=True), X.T @ [1, 2, 3])
    s, u, v = tf.linalg.svd(X)
    np.testing.assert_allclose(u @ np.diag(s) @ v.T, X, atol=1e-5)
    np.testing.assert_allclose(tf.linalg.svd(X, compute_uv=False), s, atol=1e-5)
    np.testing.assert_array_equal(tf.linalg.diag_part(square), [2, 3])
    np.testing.assert_allclose(tf.linalg.solve(square, [[1.0], [2.0]]), np.linalg.solve(square, [[1], [2]]))
    np.testing.assert_array_equal(tf.linalg.einsum("ij->j", X), X.sum(0))


def test_differences_between_neighbours():
    images = np.arange(24.0).reshape(2, 2, 3, 2)
    wanted = np.abs(np.diff(images, axis=1)).sum((1, 2, 3)) + np.abs(np.diff(images, axis=2)).sum((1, 2, 3))
    np.testing.assert_array_equal(tf.image.total_variation(images), wanted)
