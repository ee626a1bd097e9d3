"""What callers say beside the arguments of a strategy: `RunOptions`, and what each worker must have."""

from __future__ import annotations

import dataclasses

from unisono._errors import InvalidArgumentError
from unisono._types import UserValue


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of `strategy.run`, all for TPUs of TensorFlow; they change nothing here.

    Args:
        experimental_enable_dynamic_batch_size: uneven batches always work.
        experimental_bucketizing_dynamic_shape: a program is compiled for each shape.
        experimental_xla_options: accepted for the signature; set `XLA_FLAGS` instead.

    >>> RunOptions().experimental_enable_dynamic_batch_size
    True
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: UserValue = None


@dataclasses.dataclass(frozen=True)
class WorkerTerms:
    """What constructors of 2018 ask of every worker; a client's servers get it with the kind of strategy.

    Args:
        num_devices: how many devices a worker must have; 0 for those that there are.
        shards_input: whether an `input_fn`'s elements are divided between the workers.
    """

    num_devices: int = 0
    shards_input: bool = False

    def check(self, there: int) -> None:
        """Raise unless a worker has as many devices as were asked for."""
        if self.num_devices and there != self.num_devices:
            # Each device takes a batch of its own from an input_fn: fewer would be a smaller global batch.
            raise InvalidArgumentError(
                "A worker uses all of its devices, and must have as many as its strategy asks for. Received: "
                f"num_gpus_per_worker={self.num_devices}, with {there} on this worker. Set "
                "CUDA_VISIBLE_DEVICES, or try the program with virtual CPU devices: "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={self.num_devices}."
            )
