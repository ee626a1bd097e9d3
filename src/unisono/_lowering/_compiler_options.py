"""Options of XLA's compiler for the programs of steps, and programs that several steps share.

XLA's CPU backend hands some operations to the library YNNPACK. Its convolutions are slower than those of
Eigen, which XLA takes otherwise: a 3x3 convolution of 64 images of 26x26x32 to 32 features took 28 ms instead
of 6 ms, and its gradient by the kernel 45 ms instead of 11 (2 cores, AVX-512, jaxlib 0.10.2, 2026-11-22).
"""

from __future__ import annotations

import collections
import functools
import hashlib
from collections.abc import Hashable

import jax

from unisono._mesh import ReplicaMesh

#: Programs that are kept; the oldest is dropped.
_MOST = 32

#: A program that calls Python names the function by a number, which is the same for another function.
_OF_PYTHON = ("callback", "CustomSPMDPartitioning")


class Executables:
    """Keeps compiled programs by what they compute.

    An Estimator traces its model_fn in each training and evaluation. Where the lowered program is the
    same text as an earlier one, XLA's result is taken: of an evaluation that takes 0.95 s compilation was
    0.75 s (an MLP, 2 cores, 2026-11-22).

    >>> programs = Executables()
    >>> programs.num_compiled
    0
    """

    def __init__(self) -> None:
        self._programs: collections.OrderedDict[Hashable, jax.stages.Compiled] = collections.OrderedDict()
        #: How many programs were compiled.
        self.num_compiled = 0

    def program(self, lowered: jax.stages.Lowered, mesh: ReplicaMesh) -> jax.stages.Compiled | None:
        """Return a program compiled, now or earlier; None for one that calls Python.

        Args:
            lowered: the program.
            mesh: the devices that it runs on, of which its text says nothing but their number.
        """
        text = lowered.as_text()
        if any(word in text for word in _OF_PYTHON):
            return None
        digest = hashlib.sha256(text.encode()).digest()
        key = (digest, mesh, lowered.in_tree, lowered.out_tree)
        found = self._programs.pop(key, None)  # it goes behind all others; threads may do so at once
        if found is None:
            found = lowered.compile()
            self.num_compiled += 1
        self._programs[key] = found
        if len(self._programs) > _MOST:
            self._programs.popitem(last=False)
        return found


#: Which operations YNNPACK computes: products and reductions, as in XLA's own choice, but no convolutions.
#: Without reductions a transformer's step of 4 layers and width 128 takes 378 ms instead of 270 (2026-11-22).
_OPTIONS = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"
}


def compiler_options(platform: str) -> dict[str, str]:
    """Return the options with which to compile a program, those that this version of XLA knows.

    Args:
        platform: of the devices: `"cpu"`, `"gpu"` or `"tpu"`.

    >>> compiler_options("gpu")
    {}
    """
    if platform != "cpu":
        return {}
    return {name: value for name, value in _OPTIONS.items() if _is_known(name, value)}


@functools.cache
def _is_known(name: str, value: str) -> bool:
    """Whether XLA takes an option; compiles an empty program, which takes 15 ms."""
    lowered = jax.jit(lambda: None).trace().lower(lowering_platforms=("cpu",))
    try:
        lowered.compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" not in str(error):
            raise
        return False
    return True
