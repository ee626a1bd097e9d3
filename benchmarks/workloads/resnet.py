"""The ResNet of 20 layers for images of 32x32, with batch normalization."""

from workloads import Workload, random_data

#: Filters and stride of each block of two convolutions.
BLOCKS = [(16, 1)] * 3 + [(32, 2), (32, 1), (32, 1), (64, 2), (64, 1), (64, 1)]


def keras_model():
    import keras

    layers = keras.layers

    def normalized(x, filters, size, strides=1):
        x = layers.Conv2D(filters, size, strides, padding="same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    image = keras.Input((32, 32, 3))
    x = layers.ReLU()(normalized(image, 16, 3))
    for filters, strides in BLOCKS:
        y = layers.ReLU()(normalized(x, filters, 3, strides))
        y = normalized(y, filters, 3)
        if strides > 1:
            x = normalized(x, filters, 1, strides)
        x = layers.ReLU()(layers.Add()([x, y]))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(image, layers.Dense(10, activation="softmax")(x))


def torch_model():
    from torch import nn
    from torch.nn import functional

    def normalized(channels, filters, size, stride=1):
        convolution = nn.Conv2d(channels, filters, size, stride, size // 2, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(filters, eps=1e-3, momentum=0.01))

    class Block(nn.Module):
        def __init__(self, channels, filters, stride):
            super().__init__()
            self.first = normalized(channels, filters, 3, stride)
            self.second = normalized(filters, filters, 3)
            self.shortcut = normalized(channels, filters, 1, stride) if stride > 1 else nn.Identity()

        def forward(self, x):
            y = self.second(functional.relu(self.first(x)))
            return functional.relu(self.shortcut(x) + y)

    layers, channels = [normalized(3, 16, 3), nn.ReLU()], 16
    for filters, stride in BLOCKS:
        layers.append(Block(channels, filters, stride))
        channels = filters
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def workload():
    return Workload(4, 3, random_data((32, 32, 3), 10), keras_model, torch_model, image=True)
