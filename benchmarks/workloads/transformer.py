"""A transformer that classifies texts; by default 4 layers, width 128, 4 heads, sequences of 64 tokens."""

import functools

from workloads import Workload, random_data

HEADS = 4


def keras_model(layers, width, hidden, tokens, vocabulary):
    import keras

    made = keras.layers
    text = keras.Input((tokens,), dtype="int32")
    x = made.Embedding(vocabulary, width)(text)
    for _ in range(layers):
        h = made.LayerNormalization()(x)
        x = x + made.MultiHeadAttention(HEADS, width // HEADS)(h, h)
        h = made.LayerNormalization()(x)
        x = x + made.Dense(width)(made.Dense(hidden, activation="gelu")(h))
    x = made.GlobalAveragePooling1D()(x)
    return keras.Model(text, made.Dense(10, activation="softmax")(x))


def torch_model(layers, width, hidden, vocabulary):
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.before_attention = nn.LayerNorm(width, eps=1e-3)
            self.attention = nn.MultiheadAttention(width, HEADS, batch_first=True)
            self.before_dense = nn.LayerNorm(width, eps=1e-3)
            self.dense = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

        def forward(self, x):
            h = self.before_attention(x)
            x = x + self.attention(h, h, h, need_weights=False)[0]
            return x + self.dense(self.before_dense(x))

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(vocabulary, width)
            self.blocks = nn.Sequential(*[Block() for _ in range(layers)])
            self.last = nn.Linear(width, 10)

        def forward(self, x):
            return self.last(self.blocks(self.embedding(x)).mean(1))

    return Classifier()


# Eight steps: long ones run in groups whose size grows within an epoch.
def workload(layers=4, width=128, hidden=512, tokens=64, vocabulary=1000, steps=8):
    return Workload(
        steps,
        3,
        random_data((tokens,), 10, vocabulary),
        functools.partial(keras_model, layers, width, hidden, tokens, vocabulary),
        functools.partial(torch_model, layers, width, hidden, vocabulary),
    )
