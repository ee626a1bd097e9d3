"""The workers of Ray Train, and actors or tasks of Ray that state their ranks.

Ray is never imported here: a process that Ray has started has imported it.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import MutableMapping
from typing import Any

from unisono._errors import ClusterError, InvalidArgumentError
from unisono.cluster_resolver._jax import JaxClusterResolver
from unisono.cluster_resolver._spec import Timeouts, with_port
from unisono.rpc._ports import listen

#: Seconds between two attempts to find what the first worker has published.
_POLL = 0.1
_EXAMPLE = "`RayClusterResolver(rank=0, world_size=2)`"


class RayClusterResolver(JaxClusterResolver):
    """The workers of Ray Train; or actors or tasks of Ray, which state their ranks.

    Ray Train says each worker's rank. A plain actor or task does not know its rank: state it. All of them
    make the resolver, and agree on an address of the first one: it publishes it in a small actor, which is
    named after the workers' placement group.

    Args:
        rank: this worker's number, instead of Ray Train's.
        world_size: how many workers there are, instead of Ray Train's number.
        name: what the workers have in common, and others have not. None for their placement group.
        timeout: seconds to wait for the first worker; as long as for the start of a cluster by default.

    Raises:
        InvalidArgumentError: outside a worker of Ray, or when rank, size or name are missing or do not fit.
        ClusterError: when the first worker has published no address in time.

    >>> try:
    ...     RayClusterResolver(rank=0, world_size=2)
    ... except ValueError as error:
    ...     print(str(error).partition(".")[0])
    The process must be a worker of Ray
    """

    def __init__(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        name: str | None = None,
        timeout: float | None = None,
    ) -> None:
        ray = _connected_ray()
        if ray is None:
            raise InvalidArgumentError(
                "The process must be a worker of Ray. Received: one without a connection to Ray. Make the "
                "resolver in the training function of Ray Train, in an actor or a task."
            )
        known = ray_train_rank()
        own, size = (None, None) if known is None else known
        own, size = own if rank is None else rank, size if world_size is None else world_size
        if own is None or size is None:
            raise InvalidArgumentError(
                "A plain actor or task of Ray must state which worker it is, as Ray does not say it. "
                f"Received: rank={rank}, world_size={world_size}. Write {_EXAMPLE}, with each worker's own "
                "rank; or use Ray Train or `unisono.ray.Trainer`."
            )
        if not 0 <= own < size:
            raise InvalidArgumentError(
                f"`rank` must be from 0 to `world_size` - 1. Received: rank={own}, world_size={size}. Write "
                f"{_EXAMPLE}."
            )
        board = f"unisono-{name or _placement_group(ray)}"
        seconds = Timeouts().start_up if timeout is None else timeout
        context = ray.get_runtime_context()
        worker = context.get_actor_id() or context.get_task_id() or ""
        address, _ = _agreed(board, worker, own, size, seconds)
        super().__init__(address, size, own, environ={})

    @classmethod
    def detect(cls, environ: MutableMapping[str, str]) -> RayClusterResolver | None:
        """Return a resolver in one of several workers of Ray Train."""
        known = ray_train_rank()
        return None if known is None or known[1] == 1 else cls()


def _connected_ray() -> Any:
    """Return the module of Ray where this process is connected with it; None otherwise."""
    ray: Any = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None


def ray_train_rank() -> tuple[int, int] | None:
    """Return this worker's rank in Ray Train and the number of workers; None in any other process."""
    train: Any = sys.modules.get("ray.train")
    if train is None or _connected_ray() is None:
        return None
    try:
        context = train.get_context()
        return int(context.get_world_rank()), int(context.get_world_size())
    except (AttributeError, RuntimeError, TypeError):  # not on a worker; a trial of Ray Tune has no rank
        return None


def bundles_of_placement_group() -> int:
    """Return how many bundles the placement group of this actor or task has; 0 without one."""
    ray = _connected_ray()
    group = None if ray is None else ray.util.get_current_placement_group()
    return 0 if group is None else len(group.bundle_specs)


def _placement_group(ray: Any) -> str:
    group = ray.get_runtime_context().get_placement_group_id()
    if group is None:
        raise InvalidArgumentError(
            "Workers of Ray must be in a placement group, or have a name in common. Received: a process in "
            "no placement group. Write `RayClusterResolver(rank=0, world_size=2, name='this run')`, a name "
            "that no other workers have."
        )
    return str(group)


@functools.cache
def _agreed(board: str, worker: str, rank: int, size: int, seconds: float) -> tuple[str, Any]:
    """Return the first worker's address and, on itself, the actor that publishes it.

    Kept as long as the process, because the actor ends with the last reference to it.

    Args:
        worker: the actor or task of Ray that asks: a process may run another one later.
    """
    ray = sys.modules["ray"]
    deadline = time.monotonic() + seconds
    while True:
        try:
            return _publish(ray, board) if rank == 0 else (_read(ray, board, seconds), None)
        # The name belongs to workers that are just ending, or nothing has that name yet.
        except (ValueError, ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            if time.monotonic() > deadline:
                what = "take" if rank == 0 else "find"
                raise ClusterError(
                    f"Worker 0 of {size} must publish its address within {seconds:g} s. Received: worker "
                    f"{rank} could not {what} the name {board!r} ({error}). Make the strategy in every "
                    "worker at the beginning; worker 0's log says why it did not."
                ) from error
            time.sleep(_POLL)


def _publish(ray: Any, board: str) -> tuple[str, Any]:
    # Inside a function, so that Ray sends the class itself: the actor's process imports no Unisono.
    class AddressBoard:
        def __init__(self, address: str) -> None:
            self._address = address

        def address(self) -> str:
            return self._address

    ip = ray.util.get_node_ip_address()
    with listen(ip) as probe:
        address = with_port(ip, int(probe.getsockname()[1]))
    here = ray.get_runtime_context().get_node_id()
    # Not in the workers' placement group, which may have no room.
    place = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=True)
    options = {"name": board, "num_cpus": 0, "scheduling_strategy": place}
    return address, ray.remote(AddressBoard).options(**options).remote(address)


def _read(ray: Any, board: str, seconds: float) -> str:
    return str(ray.get(ray.get_actor(board).address.remote(), timeout=seconds))
