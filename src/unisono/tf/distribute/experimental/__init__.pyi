"""Names of `tf.distribute.experimental`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.experimental import (
    CentralStorageStrategy as CentralStorageStrategy,
    CollectiveCommunication as CollectiveCommunication,
    CollectiveHints as CollectiveHints,
    CommunicationImplementation as CommunicationImplementation,
    CommunicationOptions as CommunicationOptions,
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    ParameterServerStrategy as ParameterServerStrategy,
    PreemptionCheckpointHandler as PreemptionCheckpointHandler,
    PreemptionWatcher as PreemptionWatcher,
    TPUStrategy as TPUStrategy,
    TerminationConfig as TerminationConfig,
    ValueContext as ValueContext,
)
from unisono.tf.distribute.experimental import (
    coordinator as coordinator,
    partitioners as partitioners,
)
