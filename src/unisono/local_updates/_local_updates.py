"""`LocalUpdates`: replicas train apart for some steps, and then average what they have learned.

Where the local state lies, and how a phase ends, is in `local_updates/_local_layout`; the steps of `fit` are
in `local_updates/_local_training`.

Tests: tests/virtual/strategies/test_local_updates.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras

from unisono._checks import whole_number
from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono._mesh import ReplicaMesh
from unisono.collectives._process_group import ProcessGroup
from unisono.local_updates._local_layout import LocalLayout, LoneLayout
from unisono.local_updates._local_training import LocalPhases
from unisono.step._layout import StateLayout, Synchronization


class LocalUpdates(Synchronization):
    """Let each replica train alone for some steps; then all continue from what they have learned together.

    Every replica takes `every` steps of the model's optimizer on its own rows, without a message. Then the
    difference between the weights at the beginning of this phase and the mean of all replicas' weights is the
    gradient for `outer_optimizer`, and all replicas continue from the weights that it gives (DiLoCo,
    https://arxiv.org/abs/2311.08105). Without an outer optimizer they continue from the mean (local SGD).

    With `fragments` the weights are not exchanged at once: a phase has an exchange for each fragment of them,
    at equal distances (streaming DiLoCo, https://arxiv.org/abs/2501.18512).

    With `overlap` replicas do not wait for an exchange: they take the next steps meanwhile, and what these
    have changed is added to the weights that it gives (as in CoCoD-SGD, https://arxiv.org/abs/1906.12043).

    Args:
        every: how many steps a phase has. With 1 and no outer optimizer gradients are averaged at each step,
            as without `LocalUpdates`.
        outer_optimizer: a function that makes a `keras.Optimizer`, called for each fragment of each model; or
            an optimizer that no model uses, of which each gets a copy. A strategy of several workers must be
            made before JAX computes anything, as every optimizer does: it needs a function.
        fragments: into how many parts of about equal bytes the weights are divided, each of which is
            exchanged after every `every` steps. A weight is in one of them as a whole.
        overlap: how many steps are taken while a fragment is exchanged; True for half of those between two
            exchanges, False for none. The result is applied after this number of steps, never earlier: the
            numbers do not depend on how fast a link is.

    Raises:
        InvalidArgumentError: when `every` is not an integer of 1 or more, `fragments` or `overlap` is not one
            from 1 to `every`, or the outer optimizer is in use.
        InvalidTypeError: when the outer optimizer is not a `keras.Optimizer`.

    >>> import unisono
    >>> outer = lambda: keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    >>> strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"], sync=LocalUpdates(50, outer))
    >>> strategy.num_replicas_in_sync
    2
    """

    def __init__(
        self,
        every: int,
        outer_optimizer: keras.Optimizer | Callable[[], keras.Optimizer] | None = None,
        fragments: int = 1,
        overlap: bool | int = False,
    ) -> None:
        if whole_number(every, 1) is None:
            raise InvalidArgumentError(
                f"`every` must be a number of steps, 1 or more. Received: every={every!r}. "
                "Write `LocalUpdates(every=50)`, for example."
            )
        parts = whole_number(fragments, 1)
        if parts is None or parts > int(every):
            raise InvalidArgumentError(
                "`fragments` must be a number from 1 to `every`: each of them is exchanged once in a phase. "
                f"Received: fragments={fragments!r}, every={every}. Write `LocalUpdates({every}, "
                "fragments=1)`, for example."
            )
        if isinstance(outer_optimizer, keras.Optimizer):
            _check_is_new(outer_optimizer)
        elif outer_optimizer is not None and not callable(outer_optimizer):
            raise _not_an_optimizer(outer_optimizer)
        half = max(1, int(every) // (2 * parts))
        steps = half * overlap if isinstance(overlap, bool) else whole_number(overlap, 1)
        if steps is None or steps > int(every):
            raise InvalidArgumentError(
                "`overlap` must be True, False or a number of steps from 1 to `every`, in which each "
                f"fragment is exchanged once. Received: overlap={overlap!r}, every={every}. Write "
                f"`LocalUpdates({every}, overlap={half})`, for example."
            )
        self.every, self.fragments = int(every), parts
        #: How many steps are taken beside an exchange; 0 where steps wait for it.
        self.overlap = int(steps)
        self._outer = outer_optimizer

    @property
    def _is_synchronous(self) -> bool:
        """Whether this is nothing but the mean of all replicas' gradients at each step."""
        return self.every == 1 and self._outer is None and not self.overlap

    @property
    def _ends(self) -> tuple[int, ...]:
        """After which step of a phase each fragment is exchanged; the last one where the phase ends."""
        return tuple(self.every * (i + 1) // self.fragments for i in range(self.fragments))

    def _layout(self, layout: StateLayout, mesh: ReplicaMesh, group: ProcessGroup) -> StateLayout:
        """Return the state layout of a strategy with this `sync`.

        Raises:
            InvalidArgumentError: where the other arguments ask for another one.
            BackendError: where workers have no device for exchanges beside the steps.
        """
        if self._is_synchronous:
            return layout
        if mesh.devices_per_replica > 1:
            return self._layout_of_grid(layout, mesh, group)
        if type(layout) is not StateLayout:
            raise self._needs_all_state()
        # A replica that is alone averages with none.
        is_alone = mesh.num_replicas == 1
        phases = LocalPhases()
        return LoneLayout(mesh, self, phases) if is_alone else LocalLayout(mesh, group, self, phases)

    def _needs_all_state(self) -> InvalidArgumentError:
        return InvalidArgumentError(
            "With `LocalUpdates` each replica must hold its whole state, and no gradients are exchanged. "
            f"Received: {self!r} and another `state_layout` or a `CompressedAllReduce`. Leave one out."
        )

    def _layout_of_grid(self, layout: StateLayout, mesh: ReplicaMesh, group: ProcessGroup) -> StateLayout:
        """Return the state layout of replicas of several devices; see `_layout`.

        Raises:
            InvalidArgumentError: where the other arguments ask for another one.
        """
        from unisono.local_updates._exchange_of_parts import GridPhases
        from unisono.local_updates._local_cut_layout import LocalCutLayout, LoneCutLayout
        from unisono.model_parallel._cut_layout import CutStateLayout

        if not isinstance(layout, CutStateLayout):
            raise self._needs_all_state()
        phases = GridPhases()
        if mesh.num_replicas == 1:
            return LoneCutLayout(layout, mesh, self, phases)
        return LocalCutLayout(layout, mesh, group, self, phases)

    def _split(self, sizes: Sequence[int]) -> list[list[int]]:
        """Return for each fragment which weights it has, by their places.

        The largest weight goes first, and each to the fragment with the fewest bytes: equal layers take
        turns, as in the paper's strided fragments.

        Args:
            sizes: bytes of the weights.

        >>> LocalUpdates(50, fragments=2)._split([400, 4, 400, 4, 400, 400])
        [[0, 1, 4], [2, 3, 5]]
        """
        places: list[list[int]] = [[] for _ in range(self.fragments)]
        held = [0] * self.fragments
        for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            least = held.index(min(held))
            places[least].append(i)
            held[least] += sizes[i]
        return [sorted(each) for each in places]

    def _new_outer(self) -> keras.Optimizer | None:
        """Return a new outer optimizer for a model's fragment; None without one.

        Raises:
            InvalidTypeError: when a function returned something else.
            InvalidArgumentError: when it returned an optimizer that is in use.
        """
        if self._outer is None:
            return None
        if isinstance(self._outer, keras.Optimizer):
            return type(self._outer).from_config(self._outer.get_config())
        made: object = self._outer()
        if not isinstance(made, keras.Optimizer):
            raise _not_an_optimizer(made)
        _check_is_new(made)
        return made

    def __repr__(self) -> str:
        outer = "" if self._outer is None else ", outer_optimizer=..."
        fragments = f", fragments={self.fragments}" * (self.fragments > 1)
        overlap = f", overlap={self.overlap}" * (self.overlap > 0)
        return f"LocalUpdates({self.every}{outer}{fragments}{overlap})"


def _check_is_new(optimizer: keras.Optimizer) -> None:
    if optimizer.built:
        raise InvalidArgumentError(
            "`outer_optimizer` must be an optimizer that no model uses, or a function that makes a new one "
            f"at each call. Received: {optimizer.name!r}, which was built for one. Make a new one for "
            "`LocalUpdates`."
        )


def _not_an_optimizer(received: object) -> InvalidTypeError:
    return InvalidTypeError(
        "`outer_optimizer` must be a `keras.Optimizer`, or a function that makes one. Received: "
        f"outer_optimizer={received!r}. Write `lambda: keras.optimizers.SGD(0.7)`, for example."
    )
