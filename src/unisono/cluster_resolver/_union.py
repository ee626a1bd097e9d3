"""Several descriptions of one cluster as one.

Tests: tests/unit/cluster_resolver/test_base.py.
"""

from __future__ import annotations

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono.cluster_resolver._base import ClusterResolver
from unisono.cluster_resolver._spec import ClusterSpec


class UnionResolver(ClusterResolver):
    """The cluster that several resolvers describe together.

    Lists of one job are put after each other; where a resolver gives indices, tasks keep theirs.

    Args:
        resolvers: the parts; the first one knows which task this is, and where it runs.
        task_type: this process' job, instead of the first resolver's.
        task_id: this process' index, instead of the first resolver's.
        rpc_layer: the protocol, instead of the first resolver's.

    Raises:
        InvalidArgumentError: without resolvers.
        InvalidTypeError: when one is not a `ClusterResolver`.

    >>> from unisono.cluster_resolver._base import SimpleClusterResolver
    >>> workers = SimpleClusterResolver(ClusterSpec({"worker": ["a:1"]}), task_type="worker", task_id=0)
    >>> servers = SimpleClusterResolver(ClusterSpec({"ps": ["b:1"]}))
    >>> UnionResolver(workers, servers).cluster_spec()
    ClusterSpec({'worker': ['a:1'], 'ps': ['b:1']})
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not resolvers:
            raise InvalidArgumentError(
                "A union must have a resolver. Received: none. Write `UnionResolver(first, second)`."
            )
        for resolver in resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise InvalidTypeError(
                    f"A union must be of cluster resolvers. Received: {type(resolver).__name__}. "
                    "Write `UnionResolver(SimpleClusterResolver(spec), TFConfigClusterResolver())`."
                )
        self._resolvers = resolvers
        first = resolvers[0]
        self.task_type = first.task_type if task_type is None else task_type
        self.task_id = first.task_id if task_id is None else task_id
        self.rpc_layer = first.rpc_layer if rpc_layer is None else rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Return all tasks of all resolvers.

        Raises:
            InvalidArgumentError: when two resolvers give one task two addresses, or two tasks one.
        """
        specs = [resolver.cluster_spec() for resolver in self._resolvers]
        # In the order of first mention; a set would have none.
        jobs = dict.fromkeys(job for spec in specs for job in spec)
        return ClusterSpec({job: _merged(job, [s for s in specs if job in s]) for job in jobs})

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of a task, or the first resolver's answer where none is named."""
        if task_type is None or task_id is None:
            return self._resolvers[0].master(rpc_layer=rpc_layer or self.rpc_layer)
        return super().master(task_type, task_id, rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Return the first resolver's answer."""
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)

    @property
    def environment(self) -> str:
        """Where the first resolver says that the cluster runs."""
        return self._resolvers[0].environment


def _merged(job: str, specs: list[ClusterSpec]) -> list[str] | dict[int, str]:
    parts = [spec.as_dict()[job] for spec in specs]
    # As in TensorFlow: lists are joined, and as soon as one part has indices all are taken by index.
    if all(isinstance(part, list) for part in parts):
        return [address for part in parts for address in part]
    merged: dict[int, str] = {}
    for spec in specs:
        for index in spec.task_indices(job):
            address = spec.task_address(job, index)
            if merged.setdefault(index, address) != address:
                raise InvalidArgumentError(
                    f"A task must have one address. Received: {job}:{index} is {merged[index]!r} and "
                    f"{address!r}. Give the tasks of the resolvers different indices."
                )
    return merged


#: TensorFlow's newer name.
UnionClusterResolver = UnionResolver
