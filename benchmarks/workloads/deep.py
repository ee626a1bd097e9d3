"""A deep model of small layers: dense layers of width 64, every third with a LayerNormalization.

Its steps are short, so what a user waits for is the compiler.
"""

from workloads import Workload, random_data


def keras_model(depth):
    import keras

    layers = keras.layers
    model = keras.Sequential([keras.Input((64,))])
    for i in range(depth):
        model.add(layers.Dense(64, activation="relu"))
        if i % 3 == 2:
            model.add(layers.LayerNormalization())
    model.add(layers.Dense(10, activation="softmax"))
    return model


def workload(depth):
    return Workload(64, 5, random_data((64,), 10), lambda: keras_model(depth))
