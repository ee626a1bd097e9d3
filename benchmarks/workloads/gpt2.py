"""A transformer of GPT-2's size and shape, which predicts the next token, without dropout."""

import functools

from workloads import Workload


def keras_model(layers, width, heads, tokens, vocabulary):
    import keras

    class Positions(keras.layers.Layer):
        """Adds a learned vector for each position."""

        def build(self, shape):
            self.vectors = self.add_weight(shape=shape[1:], initializer="normal")

        def call(self, x):
            return x + self.vectors

    made = keras.layers
    text = keras.Input((tokens,), dtype="int32")
    embedding = made.ReversibleEmbedding(vocabulary, width)
    x = Positions()(embedding(text))
    for _ in range(layers):
        h = made.LayerNormalization()(x)
        x = x + made.MultiHeadAttention(heads, width // heads)(h, h, use_causal_mask=True)
        h = made.LayerNormalization()(x)
        x = x + made.Dense(width)(made.Dense(4 * width, activation="gelu")(h))
    logits = embedding(made.LayerNormalization()(x), reverse=True)
    return keras.Model(text, made.Activation("linear", dtype="float32")(logits))


def data(tokens, vocabulary, rows):
    import numpy as np

    texts = np.random.default_rng(0).integers(0, vocabulary, (rows, tokens + 1)).astype(np.int32)
    return texts[:, :-1].copy(), texts[:, 1:].copy()


def workload(layers=12, width=768, heads=12, tokens=1024, vocabulary=50257):
    model = functools.partial(keras_model, layers, width, heads, tokens, vocabulary)
    return Workload(20, 5, functools.partial(data, tokens, vocabulary), model, logits=True)
