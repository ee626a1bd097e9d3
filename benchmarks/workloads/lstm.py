"""An LSTM that classifies texts of 80 tokens."""

from workloads import Workload, random_data

TOKENS, VOCABULARY = 80, 5000


def keras_model():
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((TOKENS,), dtype="int32"),
            layers.Embedding(VOCABULARY, 64),
            layers.LSTM(64),
            layers.Dense(2, activation="softmax"),
        ]
    )


def torch_model():
    from torch import nn

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, 64)
            self.lstm = nn.LSTM(64, 64, batch_first=True)
            self.last = nn.Linear(64, 2)

        def forward(self, x):
            return self.last(self.lstm(self.embedding(x))[0][:, -1])

    return Classifier()


def workload():
    return Workload(24, 5, random_data((TOKENS,), 2, VOCABULARY), keras_model, torch_model)
