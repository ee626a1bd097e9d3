"""From a pure step to a running one: jit with donation.

Tests: tests/virtual/step/test_run_ahead.py, tests/virtual/step/test_compiler.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Generic, TypeAlias, TypeVar

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from unisono._features import load
from unisono._lowering._compiler_options import Executables, compiler_options
from unisono._mesh import ReplicaMesh
from unisono._reads import NOT_IN_A_STEP, read_by
from unisono._system._blocks import garbage_collection_paused
from unisono._system._interrupts import INTERRUPTS
from unisono._types import PyTree, Tree
from unisono.collectives._process_group import ProcessGroup, ProgramToken, SingleProcessGroup
from unisono.step._run_ahead import run_ahead_of

#: Calls in which JAX may compile, and starts the program from Python code.
_CAREFUL_CALLS = 3


Donated = TypeVar("Donated")
Kept = TypeVar("Kept")
Outputs = TypeVar("Outputs")

#: What a started step returns: outputs, the new state, and a token that is ready when the step is done.
Started: TypeAlias = tuple[Outputs, Donated, ProgramToken]


class CompiledStep(Generic[Donated, Kept, Outputs]):
    """A pure function compiled for a mesh, with its state donated.

    Args:
        fn: from `(donated, kept)` to `(outputs, state)`; both pytrees of arrays.
        state_shardings: where the new state goes; a pytree prefix, or None.
        in_specs: with `out_specs`, run `fn` in `jax.shard_map`: once per replica.
        out_specs: the counterpart for `(outputs, state)`.
        process_group: the processes that run the step together; this one alone by default.
        donates: whether the step may reuse the memory of the state that it is given.
        result_sharding: where all outputs go; None for where XLA computes them.
        executables: where an equal program of another step may have been compiled; None to compile it.
        around: surrounds the first start, in which the program is compiled.
    """

    def __init__(
        self,
        fn: Callable[[Donated, Kept], tuple[Outputs, Donated]],
        mesh: ReplicaMesh,
        state_shardings: PyTree = None,
        in_specs: PyTree = None,
        out_specs: PyTree = None,
        process_group: ProcessGroup | None = None,
        donates: bool = True,
        result_sharding: jax.sharding.Sharding | None = None,
        executables: Executables | None = None,
        around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self._mesh, self._executables, self._around = mesh, executables, around
        self._group = process_group or SingleProcessGroup()
        self._dispatch = self._group.dispatch
        self._is_alone = isinstance(self._group, SingleProcessGroup)
        self._run_ahead = run_ahead_of(mesh)
        if in_specs is not None and mesh.num_replicas > 1:
            fn = mesh.on_replicas(fn, in_specs, out_specs)

        @INTERRUPTS.interruptible
        def with_token(donated: Donated, kept: Kept) -> tuple[Outputs, Donated, jax.Array]:
            # The token is ready when the step is done; the other outputs may be donated on.
            with read_by(NOT_IN_A_STEP):
                return *fn(donated, kept), jnp.zeros((), jnp.int8)

        # A debugged step is run again op by op after a NaN was found, which needs its inputs.
        self._is_guarded = any(getattr(jax.config, name) for name in ("jax_debug_nans", "jax_debug_infs"))
        self._donates = donates and not self._is_guarded
        self._compiled = jax.jit(
            with_token,
            donate_argnums=(0,) if self._donates else (),
            out_shardings=(result_sharding, state_shardings, None),
            compiler_options=compiler_options(mesh.platform),
        )
        #: What is called: JAX's function, or a program that was compiled before.
        self._program: Callable[[Donated, Kept], Started[Outputs, Donated]] = self._compiled
        self._careful: float | None = None

    def __call__(
        self,
        donated: Donated,
        kept: Kept,
        done: list[Started[Outputs, Donated]] | None = None,
        is_result: bool = False,
    ) -> tuple[Outputs, Donated]:
        """Start the step; returns before it is done.

        Args:
            donated: the state; deleted when the step starts.
            done: becomes `[(outputs, state, token)]` when the step starts, also where an exception such
                as `KeyboardInterrupt` follows: nothing else holds the state then.
            is_result: whether a program has returned the state, and no code has read it since: then no
                array of it is there twice.
        """
        if self._is_guarded:
            return self._guarded(donated, kept)
        done = [] if done is None else done
        is_careful = self._careful is None or self._careful > 0
        # The arrays that JAX's Python code returns may be equal objects.
        if self._donates and (is_careful or not is_result):
            donated = _without_aliases(donated, kept)
        given, kept_of_one = (donated,), (kept,)
        if is_careful:
            with self._around() if self._careful is None else contextlib.nullcontext(), self._dispatch():
                self._start_carefully(given, kept_of_one, done)
        elif self._is_alone:
            # One instruction: Python handles a signal before it or after it.
            done[:] = map(self._program, given, kept_of_one)
        else:
            # On CPUs the call itself may wait for the other workers.
            with self._dispatch():
                done[:] = map(self._program, given, kept_of_one)
        outputs, state, token = done[0]
        self._group.step_started(token)
        self._run_ahead.wait_for_capacity(token)
        return outputs, state

    def _start_carefully(
        self, given: tuple[Donated], kept: tuple[Kept], done: list[Started[Outputs, Donated]]
    ) -> None:
        """Start the step where JAX does it in Python code: at first, and always if it has side effects."""
        is_new = self._careful is None
        with INTERRUPTS.put_off(), garbage_collection_paused() if is_new else contextlib.nullcontext():
            if self._careful is None:
                effects = self.jaxpr(*given, *kept).effects
                self._careful = math.inf if effects else _CAREFUL_CALLS
                if self._executables is not None and not effects:
                    self._take_compiled(self._executables, given, kept)
            try:
                done[:] = map(self._program, given, kept)
            except (TypeError, ValueError):
                if self._program is self._compiled:
                    raise
                # Before it has begun: a compiled program takes arguments of one form alone.
                self._program = self._compiled
                done[:] = map(self._program, given, kept)
            self._careful -= 1

    def _take_compiled(self, executables: Executables, given: tuple[Donated], kept: tuple[Kept]) -> None:
        """Use a program that was compiled before, which JAX starts from Python code."""
        found = executables.program(self._compiled.lower(*given, *kept), self._mesh)
        if found is not None:
            self._program, self._careful = found, math.inf

    def _guarded(self, donated: Donated, kept: Kept) -> tuple[Outputs, Donated]:
        """Run the step and look for NaNs in all that it computed.

        JAX's own guard runs the step again op by op, which never ends inside `shard_map`.
        """
        looks_for_infs = getattr(jax.config, "jax_debug_infs")  # noqa: B009 (JAX's types lack it)
        with jax.debug_nans(False), jax.debug_infs(False):
            outputs, state, _ = self._compiled(donated, kept)
            load("check for NaNs")((outputs, state), looks_for_infs)
        return outputs, state

    def jaxpr(self, donated: Donated, kept: Kept) -> jex.ClosedJaxpr:
        """The traced program; calling it later with such arguments does not trace it again."""
        with garbage_collection_paused():
            traced: jex.ClosedJaxpr = self._compiled.trace(donated, kept).jaxpr
        return traced

    def compilation(self, donated: Donated, kept: Kept) -> Callable[[], jax.stages.Compiled]:
        """Return a function that compiles the program in any thread; it is traced in this one."""
        with garbage_collection_paused():
            traced = self._compiled.trace(donated, kept)
        return lambda: traced.lower().compile()

    def use(self, program: jax.stages.Compiled) -> None:
        """Let further calls run what `compilation` has compiled, which JAX starts from Python code."""
        self._program, self._careful = program, math.inf

    def lower(self, donated: Donated, kept: Kept) -> jax.stages.Lowered:
        """JAX's lowered program, for looking into it."""
        return self._compiled.lower(donated, kept)


def _without_aliases(donated: Tree, kept: object) -> Tree:
    """Copy arrays that are donated twice, or donated and kept: two variables may share one array."""
    leaves, structure = jax.tree.flatten(donated)
    seen = {id(x) for x in jax.tree.leaves(kept)}
    if len({id(x) for x in leaves} | seen) == len(leaves) + len(seen):
        return donated
    single = []
    for leaf in leaves:
        single.append(jnp.copy(leaf) if id(leaf) in seen else leaf)
        seen.add(id(leaf))
    copied: Tree = jax.tree.unflatten(structure, single)
    return copied
