"""An LSTM that classifies texts, of 80 tokens by default."""

import functools

from workloads import Workload, random_data


def keras_model(tokens, vocabulary, units, classes):
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((tokens,), dtype="int32"),
            layers.Embedding(vocabulary, 64),
            layers.LSTM(units),
            layers.Dense(classes, activation="softmax"),
        ]
    )


def torch_model(vocabulary, units, classes):
    from torch import nn

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(vocabulary, 64)
            self.lstm = nn.LSTM(64, units, batch_first=True)
            self.last = nn.Linear(units, classes)

        def forward(self, x):
            return self.last(self.lstm(self.embedding(x))[0][:, -1])

    return Classifier()


def workload(tokens=80, vocabulary=5000, units=64, classes=2, steps=24):
    return Workload(
        steps,
        5,
        random_data((tokens,), classes, vocabulary),
        functools.partial(keras_model, tokens, vocabulary, units, classes),
        functools.partial(torch_model, vocabulary, units, classes),
    )
