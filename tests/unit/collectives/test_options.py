"""What `CommunicationOptions` choose."""

import jax
import pytest

from unisono import CommunicationImplementation, CommunicationOptions
from unisono._errors import InvalidArgumentError
from unisono.cluster import _distributed
from unisono.collectives._cross_device import BYTES_PER_PACK, PackedAllReduce


@pytest.mark.parametrize(
    ("implementation", "platform", "algorithm"),
    [
        ("AUTO", "cpu", "exchange"),
        ("auto", "gpu", "xla"),
        ("AUTO", "tpu", "xla"),
        ("RING", "cpu", "ring"),
        ("RING", "gpu", "ring"),
        ("NCCL", "gpu", "xla"),
        (CommunicationImplementation.NCCL, "cpu", "exchange"),
    ],
)
def test_the_way_that_sums_travel(implementation, platform, algorithm):
    options = CommunicationOptions(implementation=implementation)
    assert PackedAllReduce(options, platform, on_one_host=True)._algorithm == algorithm
    between = "across_hosts" if algorithm == "exchange" else algorithm
    assert PackedAllReduce(options, platform, on_one_host=False)._algorithm == between


def test_arrays_are_packed_where_xla_does_not_combine_them():
    def packing(platform, **options):
        return PackedAllReduce(CommunicationOptions(**options), platform, on_one_host=False)._packing()

    assert packing("cpu") == packing("gpu", implementation="RING") == {"bytes_per_pack": BYTES_PER_PACK}
    assert packing("gpu") == packing("tpu") == {"bytes_per_pack": 0}
    assert packing("gpu", bytes_per_pack=7) == packing("cpu", bytes_per_pack=7) == {"bytes_per_pack": 7}


@pytest.mark.parametrize(("configured", "taken"), [("gloo", "gloo"), ("mpi", "mpi"), (None, "gloo")])
def test_mpi_is_taken_where_it_is_configured(configured, taken):
    name = "jax_cpu_collectives_implementation"
    before = getattr(jax.config, name)
    try:
        jax.config.update(name, configured)
        assert _distributed._choose_transport() == (taken == "gloo")
        assert getattr(jax.config, name) == taken
    finally:
        jax.config.update(name, before)


@pytest.mark.parametrize("interface", ["", " ", 3])
def test_an_interface_is_a_text(interface):
    with pytest.raises(InvalidArgumentError, match=r"Received: interface=.*interface='eth0'"):
        CommunicationOptions(interface=interface)
