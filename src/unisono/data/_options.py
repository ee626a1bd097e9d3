"""`Options` of a data set: how a distribution splits it.

Tests: tests/unit/data/test_sharding.py.
"""

from __future__ import annotations

import copy
import dataclasses

from unisono._errors import InvalidArgumentError
from unisono.data._sharding import AutoShardPolicy


@dataclasses.dataclass(slots=True)
class DistributeOptions:
    """How a data set is split over workers.

    Args:
        auto_shard_policy: The unit that is split: files, elements, or nothing.

    >>> DistributeOptions().auto_shard_policy.name
    'AUTO'
    """

    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO


@dataclasses.dataclass(slots=True)
class Options:
    """Options of a data set, set by `Dataset.with_options`.

    Args:
        experimental_distribute: How it is split over workers.
        deterministic: Accepted for compatibility; the order of elements is always deterministic.

    >>> options = Options()
    >>> options.experimental_distribute.auto_shard_policy.name
    'AUTO'
    """

    experimental_distribute: DistributeOptions = dataclasses.field(default_factory=DistributeOptions)
    deterministic: bool | None = None

    def merged(self, later: Options) -> Options:
        """Return these options, overridden by those that `later` sets.

        Args:
            later: The options that take precedence.

        Returns:
            New options.

        Raises:
            InvalidArgumentError: the policy is none of `AutoShardPolicy`.
        """
        # Deep, because `experimental_distribute` is an object that the user may change later.
        result = copy.deepcopy(self)
        policy = later.experimental_distribute.auto_shard_policy
        if not isinstance(policy, AutoShardPolicy):
            raise InvalidArgumentError(
                "`auto_shard_policy` must be an `AutoShardPolicy`. Received: "
                f"{policy!r}. Write `unisono.data.experimental.AutoShardPolicy.DATA`."
            )
        # AUTO is the default and counts as not set: it must not override a policy that was chosen earlier.
        if policy != AutoShardPolicy.AUTO:
            result.experimental_distribute.auto_shard_policy = policy
        if later.deterministic is not None:
            result.deterministic = later.deterministic
        return result
