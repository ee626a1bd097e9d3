"""Names that tf.distribute keeps under `experimental`, for old programs."""

from unisono.checkpoint._preemption import PreemptionCheckpointHandler, TerminationConfig
from unisono.collectives._cross_device import CommunicationImplementation, CommunicationOptions
from unisono.data._sharding import ValueContext
from unisono.export import export_saved_model, load_from_saved_model
from unisono.strategies._central_storage import CentralStorageStrategy
from unisono.strategies._multi_worker import MultiWorkerMirroredStrategy
from unisono.strategies._tpu import TPUStrategy

CollectiveCommunication = CommunicationImplementation

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "PreemptionCheckpointHandler",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
    "export_saved_model",
    "load_from_saved_model",
]
