"""Options of XLA's compiler for the programs of steps.

XLA's CPU backend hands some operations to the library YNNPACK. Its convolutions are slower than those of
Eigen, which XLA takes otherwise: a 3x3 convolution of 64 images of 26x26x32 to 32 features took 28 ms instead
of 6 ms, and its gradient by the kernel 45 ms instead of 11 (2 cores, AVX-512, jaxlib 0.10.2, 2026-11-22).
"""

from __future__ import annotations

import functools

import jax

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
