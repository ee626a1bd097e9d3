"""Programs as the library compiles them, lowered for accelerators that are not here, and what they hold."""

import collections
import contextlib
import dataclasses
import math

import jax
import pytest
from jax.interpreters import mlir

from unisono._mesh import ReplicaMesh
from unisono.step._dispatch import CompiledStep

#: Operations by which devices exchange values.
EXCHANGES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")


@dataclasses.dataclass
class Counts:
    """What a lowered program holds.

    Args:
        donated: how many arguments give their memory to a result.
        exchanges: for each kind of collective, how often it is in the program's text, and the bytes.
        products: how many matrix products and convolutions there are, by the types of their operands.
        calls: the targets of custom calls.
    """

    donated: int
    exchanges: dict
    products: dict
    calls: set

    @classmethod
    def of(cls, module):
        """Count in a module of StableHLO."""
        exchanges, products = {}, collections.Counter()
        calls = set()

        def visit(operation):
            name = operation.name.removeprefix("stablehlo.")
            if name in EXCHANGES:
                count, size = exchanges.get(name, (0, 0))
                exchanges[name] = count + 1, size + sum(_bytes(x.type) for x in operation.operands)
            elif name in ("dot_general", "convolution", "select_and_scatter"):
                kind = mlir.ir.ShapedType(operation.operands[0].type).element_type
                products[f"{name} {kind}"] += 1
            elif name == "custom_call":
                calls.add(operation.attributes["call_target_name"].value)
            return mlir.ir.WalkResult.ADVANCE

        with module.context:
            module.operation.walk(visit)
            (main,) = (f for f in module.body.operations if _name(f) == "main")
            arguments = main.attributes["arg_attrs"] if "arg_attrs" in main.attributes else []  # noqa: SIM401
            donated = sum("tf.aliasing_output" in a or "jax.buffer_donor" in a for a in arguments)
        return cls(donated, exchanges, dict(products), calls)


def _name(function):
    return function.attributes["sym_name"].value if "sym_name" in function.attributes else ""


def _bytes(kind):
    shaped = mlir.ir.ShapedType(kind)
    return math.prod(shaped.shape) * (shaped.element_type.width // 8)


@dataclasses.dataclass
class Program:
    """A program that the library has started, and the forms of its arguments."""

    step: CompiledStep
    donated: object
    kept: object

    @property
    def num_state(self):
        """How many arrays of state it changes."""
        return len(jax.tree.leaves(self.donated))

    def lowered(self, platform):
        """Return the program lowered for a platform."""
        traced = self.step._compiled.trace(self.donated, self.kept)
        return traced.lower(lowering_platforms=(platform,))

    def counts(self, platform):
        """Return what it holds there."""
        return Counts.of(self.lowered(platform).compiler_ir("stablehlo"))


@contextlib.contextmanager
def programs_on(platform):
    """Let the library take the devices of meshes for those of a platform, and note the programs it starts.

    The programs are traced, and run on the CPUs of this machine, as if these were GPUs or TPUs.

    Args:
        platform: `"gpu"` or `"tpu"`.
    """
    noted, started = {}, CompiledStep.__call__

    def call(self, donated, kept, done=None, is_result=False):
        if id(self) not in noted:
            noted[id(self)] = Program(self, *jax.tree.map(_form, (donated, kept)))
        return started(self, donated, kept, done)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplicaMesh, "platform", platform)
        patch.setattr(CompiledStep, "__call__", call)
        yield noted.values()


def _form(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))
