"""A transformer that classifies texts: 4 layers, width 128, 4 heads, sequences of 64 tokens."""

from workloads import Workload, random_data

LAYERS, WIDTH, HEADS, TOKENS, VOCABULARY = 4, 128, 4, 64, 1000


def keras_model():
    import keras

    layers = keras.layers
    tokens = keras.Input((TOKENS,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH)(tokens)
    for _ in range(LAYERS):
        h = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(h, h)
        h = layers.LayerNormalization()(x)
        x = x + layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, activation="gelu")(h))
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(tokens, layers.Dense(10, activation="softmax")(x))


def torch_model():
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.before_attention = nn.LayerNorm(WIDTH, eps=1e-3)
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
            self.before_dense = nn.LayerNorm(WIDTH, eps=1e-3)
            self.dense = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

        def forward(self, x):
            h = self.before_attention(x)
            x = x + self.attention(h, h, h, need_weights=False)[0]
            return x + self.dense(self.before_dense(x))

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
            self.last = nn.Linear(WIDTH, 10)

        def forward(self, x):
            return self.last(self.blocks(self.embedding(x)).mean(1))

    return Classifier()


def workload():
    # Eight steps: long ones run in groups whose size grows within an epoch.
    return Workload(8, 3, random_data((TOKENS,), 10, VOCABULARY), keras_model, torch_model)
