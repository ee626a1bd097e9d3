"""Names of `tf.keras.callbacks` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.callbacks import (
    CSVLogger as CSVLogger,
    Callback as Callback,
    CallbackList as CallbackList,
    EarlyStopping as EarlyStopping,
    History as History,
    LambdaCallback as LambdaCallback,
    LearningRateScheduler as LearningRateScheduler,
    OrbaxCheckpoint as OrbaxCheckpoint,
    ProgbarLogger as ProgbarLogger,
    ReduceLROnPlateau as ReduceLROnPlateau,
    RemoteMonitor as RemoteMonitor,
    SwapEMAWeights as SwapEMAWeights,
    TerminateOnNaN as TerminateOnNaN,
)
from unisono.callbacks import (
    BackupAndRestore as BackupAndRestore,
    TensorBoard as TensorBoard,
)
from unisono.tf.adapters._keras import (
    ModelCheckpoint as ModelCheckpoint,
)
from unisono.tf.keras.callbacks import (
    experimental as experimental,
)
