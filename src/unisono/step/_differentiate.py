"""Derivatives of a traced computation, also by values computed in its middle.

The computation is traced to a jaxpr; where a source is computed inside it, the jaxpr is cut
there and the source becomes an argument. Sources that the target does not depend on get None.

Tests: tests/virtual/step/test_tape.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from unisono._types import PyTree

_Values = list[tuple[jax.Array, ...]]

#: A gradient for each source; None for one without.
Gradients = list[jax.Array | None]


def gradient_of(
    replay: Callable[[_Values], tuple[jax.Array, list[list[jax.Array]]]], values: _Values
) -> list[tuple[Gradients, Gradients]]:
    """Differentiate a replay by its arguments and by the tensors that it watched.

    Args:
        replay: from values to `(scalar, watched)`, with a list of watched tensors for each
            entry of `values`.

    Returns:
        For each entry of `values`: its gradients, and those of its watched tensors. None where
        the scalar does not depend on the source, or the source is not of a floating type.
    """
    flat, structure = jax.tree.flatten(values)
    counts: list[int] = []

    def flat_replay(*args: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        scalar, watched = replay(jax.tree.unflatten(structure, args))
        counts[:] = [len(w) for w in watched]
        return scalar, [jnp.asarray(t) for w in watched for t in w]

    closed = jax.make_jaxpr(flat_replay)(*flat)
    cut = _CutJaxpr(closed, len(flat))
    primals = cut.watched_primals(flat)
    grads = cut.gradients([*flat, *primals])
    of_values = jax.tree.unflatten(structure, [_Leaf(g) for g in grads[: len(flat)]])
    of_watched, at = [], len(flat)
    for count in counts:
        of_watched.append(grads[at : at + count])
        at += count
    return [([leaf.grad for leaf in own], w) for own, w in zip(of_values, of_watched, strict=True)]


class _Leaf:
    """Holds a gradient that may be None as one leaf of a pytree."""

    def __init__(self, grad: jax.Array | None) -> None:
        self.grad = grad


class _CutJaxpr:
    """A jaxpr `args -> (scalar, *watched)` as a function of `(args, watched) -> scalar`."""

    def __init__(self, closed: jex.ClosedJaxpr, num_args: int) -> None:
        self._closed = closed
        self._num_args = num_args
        jaxpr = closed.jaxpr
        self._scalar, *self._watched = jaxpr.outvars
        sources = [v for v in self._watched if isinstance(v, jex.Var)]
        self._constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        outer = {*jaxpr.invars, *jaxpr.constvars}
        self._computed = {v for v in sources if v not in outer}

    def watched_primals(self, args: list[jax.Array]) -> list[jax.Array]:
        """The values of the watched tensors at `args`."""
        if not self._watched:
            return []
        return list(jex.jaxpr_as_fun(self._closed)(*args)[1:])

    def gradients(self, primals: list[jax.Array]) -> Gradients:
        """The gradients by every argument and watched tensor, None where there is none."""
        sources = [*self._closed.jaxpr.invars, *self._watched]
        needed = self._needed()
        # `jax.grad` rejects integers and gives zeros for the unconnected; TensorFlow gives None for both.
        wanted = [
            i
            for i, (v, x) in enumerate(zip(sources, primals, strict=True))
            if isinstance(v, jex.Var) and v in needed and jnp.issubdtype(jnp.result_type(x), jnp.inexact)
        ]
        # A derivative is total: it goes through the other sources too, so each tensor that is
        # computed inside is cut out alone.
        inside = [i for i in wanted if sources[i] in self._computed]
        groups = [[i for i in wanted if i not in inside], *([i] for i in inside)]
        grads: Gradients = [None] * len(primals)
        for group in groups:
            for i, grad in zip(group, self._gradient(primals, group), strict=True):
                grads[i] = grad
        return grads

    def _gradient(self, primals: list[jax.Array], group: list[int]) -> list[jax.Array]:
        def scalar(chosen: list[jax.Array]) -> jax.Array:
            return self._call(primals, dict(zip(group, chosen, strict=True)))

        return list(jax.grad(scalar)([primals[i] for i in group])) if group else []

    def _needed(self) -> set[jex.Var]:
        """The variables that the scalar depends on through differentiable steps."""
        needed = {self._scalar} if isinstance(self._scalar, jex.Var) else set()
        for eqn in reversed(self._closed.jaxpr.eqns):
            # No derivative flows through: what lies behind is not connected.
            if eqn.primitive.name == "stop_gradient":
                continue
            if any(v in needed for v in eqn.outvars):
                needed.update(v for v in eqn.invars if isinstance(v, jex.Var))
        return needed

    def _call(self, primals: list[jax.Array], chosen: dict[int, jax.Array]) -> jax.Array:
        """Evaluate the scalar with the watched tensors given from outside."""
        jaxpr = self._closed.jaxpr
        args = [chosen.get(i, x) for i, x in enumerate(primals[: self._num_args])]
        inside: dict[jex.Var, jax.Array] = {}
        for i, value in chosen.items():
            if i < self._num_args:
                continue
            source = self._watched[i - self._num_args]
            # An argument that was watched as it is: there is nothing to cut.
            if source in jaxpr.invars:
                args[jaxpr.invars.index(source)] = value
            else:
                inside[source] = value
        constvars = [v for v in jaxpr.constvars if v not in inside]
        eqns = [_without_outputs(eqn, inside) for eqn in jaxpr.eqns]
        cut = jaxpr.replace(
            constvars=constvars,
            invars=[*jaxpr.invars, *inside],
            outvars=[self._scalar],
            eqns=eqns,
            # The known names are those of the arguments before the cut.
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        closed = jex.ClosedJaxpr(cut, [self._constants[v] for v in constvars])
        found: jax.Array = jex.jaxpr_as_fun(closed)(*args, *inside.values())[0]
        return found


def _without_outputs(eqn: jex.JaxprEqn, replaced: Mapping[jex.Var, jax.Array]) -> jex.JaxprEqn:
    """The equation with outputs that are given from outside renamed, so that none is bound twice."""
    if not any(v in replaced for v in eqn.outvars):
        return eqn
    renamed: jex.JaxprEqn = eqn.replace(
        outvars=[jex.Var(v.aval) if v in replaced else v for v in eqn.outvars]
    )
    return renamed


def total_of(target: PyTree, weights: PyTree) -> jax.Array:
    """The scalar whose derivative is wanted: the (weighted) sum of all that `target` holds."""
    leaves = jax.tree.leaves(target)
    if weights is not None:
        leaves = [x * w for x, w in zip(leaves, jax.tree.leaves(weights), strict=True)]
    return sum(map(jnp.sum, leaves[1:]), jnp.sum(leaves[0]))
