"""ResNet-50 for images of bytes: bottleneck blocks, with the stride in the convolution of 3x3."""

import functools

from workloads import Workload


def keras_model(size, blocks, width, classes):
    import keras

    layers = keras.layers

    def normalized(x, filters, kernel, strides=1):
        x = layers.Conv2D(filters, kernel, strides, padding="same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    image = keras.Input((size, size, 3), dtype="uint8")
    x = layers.Rescaling(1 / 127.5, offset=-1.0)(image)
    x = layers.ReLU()(normalized(x, width, 7, 2))
    x = layers.MaxPooling2D(3, 2, padding="same")(x)
    for stage, count in enumerate(blocks):
        filters = width * 2**stage
        for block in range(count):
            strides = 2 if stage and not block else 1
            y = layers.ReLU()(normalized(x, filters, 1))
            y = layers.ReLU()(normalized(y, filters, 3, strides))
            y = normalized(y, 4 * filters, 1)
            if not block:
                x = normalized(x, 4 * filters, 1, strides)
            x = layers.ReLU()(layers.Add()([x, y]))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(image, layers.Dense(classes, dtype="float32")(x))


def data(size, classes, rows):
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (rows, size, size, 3), dtype=np.uint8)
    return x, rng.integers(0, classes, rows).astype(np.int32)


def workload(size=224, blocks=(3, 4, 6, 3), width=64, classes=1000):
    model = functools.partial(keras_model, size, blocks, width, classes)
    return Workload(20, 5, functools.partial(data, size, classes), model, image=True, logits=True)
