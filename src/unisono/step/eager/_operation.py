"""Operations that a tape has recorded: what was computed, of which arrays, and how to differentiate it.

Tests: tests/unit/step/eager/test_recording.py.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from unisono.step.eager._jax_internals import CustomCall, Operand
from unisono.step.eager._program_keys import HasFunctionsError, derivative_key, operation_key

#: Operations without a derivative, in TensorFlow: what lies behind is not connected.
_CUTS = frozenset({"stop_gradient", "floor", "ceil", "round"})

#: Moves arrays, one to one, from some devices or kind of memory to others.
_PLACEMENT = "device_put"

#: From the inputs and the derivatives by the outputs to the derivatives by some of the inputs.
Pullback = Callable[[Sequence[Operand], Sequence[jax.Array]], Sequence[jax.Array]]


@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """How to differentiate an operation, without its arrays.

    Args:
        key: equal for operations that are differentiated in the same way.
        pullback: gets the inputs, then `consts`, and the derivatives by the outputs.
        consts: arrays that the pullback needs, besides the inputs.
    """

    key: Hashable
    pullback: Pullback
    consts: Sequence[jax.Array] = ()


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Operation:
    """One recorded operation.

    Args:
        call: where the parameters are functions: what computes it once more.
        links: for each output the positions of the inputs on which it depends; None for all of them.
        backward: the derivative, where a user gave it.
    """

    primitive: jex.Primitive
    params: Mapping[str, Any]
    call: CustomCall | None
    args: tuple[Operand, ...]
    outs: tuple[jax.Array, ...]
    links: tuple[frozenset[int], ...] | None = None
    backward: Callable[..., Sequence[jax.Array | None]] | None = None

    def inputs_of(self, output: int) -> Sequence[Operand]:
        """Return the inputs on which an output depends."""
        return self.args if self.links is None else [self.args[i] for i in self.links[output]]

    def rule(self, wanted: tuple[int, ...], given: tuple[int, ...]) -> Rule:
        """Return how to differentiate the operation.

        Args:
            wanted: the positions of the inputs by which.
            given: the positions of the outputs whose derivatives are there.
        """
        if self.primitive.name == _PLACEMENT:
            # No part of a program, whose arrays are all on the same devices: its caller places them.
            order = [given.index(i) for i in wanted]
            return Rule((_PLACEMENT, wanted, given), lambda inputs, grads: [grads[i] for i in order])
        if self.backward is None:
            try:
                return Rule((self._key(), wanted, given), self._pullback(wanted, given))
            except HasFunctionsError:
                pass
        return self._traced_rule(wanted, given)

    def _key(self) -> Hashable:
        key = operation_key(self.primitive, self.params) if self.call is None else self.call.key
        if key is None:
            raise HasFunctionsError
        return self.primitive, key

    def _compute(self, args: Sequence[Operand]) -> Sequence[jax.Array]:
        found = self.primitive.bind(*args, **self.params) if self.call is None else self.call(*args)
        return found if isinstance(found, (list, tuple)) else [found]

    def _pullback(self, wanted: tuple[int, ...], given: tuple[int, ...]) -> Pullback:
        """Return JAX's own derivative; it computes the operation again, and XLA drops what nothing needs."""
        # Not the operation itself, whose arrays a compiled derivative would keep.
        bare = dataclasses.replace(self, args=(), outs=())

        def pullback(args: Sequence[Operand], grads: Sequence[jax.Array]) -> Sequence[jax.Array]:
            def compute(chosen: list[Operand]) -> list[jax.Array]:
                by_position = dict(zip(wanted, chosen, strict=True))
                outs = bare._compute([by_position.get(i, x) for i, x in enumerate(args)])
                return [outs[i] for i in given]

            outs, backward = jax.vjp(compute, [args[i] for i in wanted])
            (found,) = backward([g.astype(o.dtype) for g, o in zip(grads, outs, strict=True)])
            return found  # type: ignore[no-any-return]

        return pullback

    def _traced_rule(self, wanted: tuple[int, ...], given: tuple[int, ...]) -> Rule:
        """Return the derivative as a program: functions that are new at each call are equal in this alone."""
        pullback = self._pullback(wanted, given) if self.backward is None else self._user_pullback(wanted)
        args, outs = list(self.args), [jax.typeof(self.outs[i]) for i in given]
        closed, consts = _traced(pullback, args, outs)
        try:
            key: Hashable = derivative_key(closed)
        except HasFunctionsError:
            key = object()
        count, jaxpr = len(args), closed.jaxpr

        def apply(inputs: Sequence[Operand], grads: Sequence[jax.Array]) -> Sequence[jax.Array]:
            program = jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, list(inputs[count:])))
            found: Sequence[jax.Array] = program(*inputs[:count], *grads)
            return found

        return Rule((key, wanted, given), apply, consts)

    def _user_pullback(self, wanted: tuple[int, ...]) -> Pullback:
        backward = self.backward

        def pullback(args: Sequence[Any], grads: Sequence[jax.Array]) -> Sequence[jax.Array]:
            found = backward(*grads) if backward else ()
            return [
                jnp.zeros_like(args[i]) if found[i] is None else jnp.asarray(found[i], args[i].dtype)
                for i in wanted
            ]

        return pullback


def _traced(
    pullback: Pullback, args: list[Operand], outs: Sequence[Any]
) -> tuple[jex.ClosedJaxpr, Sequence[jax.Array]]:
    specs = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in outs]
    closed = jax.make_jaxpr(pullback)(args, specs)
    return closed, list(closed.consts)


# --- on which inputs an output depends ----------------------------------------------------------------------

_LINKS: weakref.WeakKeyDictionary[jex.Jaxpr, tuple[frozenset[int], ...]] = weakref.WeakKeyDictionary()


def links_of(
    primitive: jex.Primitive, params: Mapping[str, Any], outs: int
) -> tuple[frozenset[int], ...] | None:
    """Return for each output of an operation the inputs on which it depends; None for all of them."""
    if primitive.name in _CUTS:
        return (frozenset(),) * outs
    if primitive.name == _PLACEMENT:
        return tuple(frozenset([i]) for i in range(outs))
    return jaxpr_links(params["jaxpr"].jaxpr) if primitive.name == "jit" else None


def jaxpr_links(jaxpr: jex.Jaxpr) -> tuple[frozenset[int], ...]:
    """Return for each output of a jaxpr the positions of the inputs on which it depends.

    Only through numbers that have derivatives, as TensorFlow's tape does.
    """
    if jaxpr in _LINKS:
        return _LINKS[jaxpr]
    depends: dict[jex.Var, frozenset[int]] = {v: frozenset([i]) for i, v in enumerate(jaxpr.invars)}
    nothing: frozenset[int] = frozenset()
    for eqn in jaxpr.eqns:
        inputs = [nothing if isinstance(v, jex.Literal) else depends.get(v, nothing) for v in eqn.invars]
        links = links_of(eqn.primitive, eqn.params, len(eqn.outvars))
        everything = nothing.union(*inputs)
        for i, out in enumerate(eqn.outvars):
            if is_differentiable(out.aval):
                found = everything if links is None else nothing.union(*(inputs[k] for k in links[i]))
                depends[out] = found
    _LINKS[jaxpr] = found_links = tuple(
        nothing if isinstance(v, jex.Literal) else depends.get(v, nothing) for v in jaxpr.outvars
    )
    return found_links


def is_differentiable(value: object) -> bool:
    """Return whether an array or a type has derivatives: floating and complex numbers do."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, np.inexact)
