"""Names of `tf.keras.optimizers` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.optimizers import (
    Adadelta as Adadelta,
    Adafactor as Adafactor,
    Adagrad as Adagrad,
    Adam as Adam,
    AdamW as AdamW,
    Adamax as Adamax,
    Ftrl as Ftrl,
    Lamb as Lamb,
    Lion as Lion,
    LossScaleOptimizer as LossScaleOptimizer,
    MultiOptimizer as MultiOptimizer,
    Muon as Muon,
    Nadam as Nadam,
    Optimizer as Optimizer,
    OptimizerMap as OptimizerMap,
    RMSprop as RMSprop,
    SGD as SGD,
    ScheduleFreeAdamW as ScheduleFreeAdamW,
    deserialize as deserialize,
    get as get,
    serialize as serialize,
)
from unisono.tf.keras.optimizers import (
    legacy as legacy,
    schedules as schedules,
)
