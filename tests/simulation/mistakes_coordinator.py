"""Mistakes in the proxy to JAX's service."""

from tests.simulation._planted import Mistake

_PROXY = "unisono.cluster._coordinator_proxy"


def _mistake(name, place, old, new):
    return Mistake(name, f"{_PROXY}:{place}", old, new, "coordinator")


MISTAKES = (
    _mistake(
        "other programs of the machine get through",
        "CoordinatorProxy._accept",
        "not is_own(near) or not self._free",
        "not self._free",
    ),
    _mistake(
        "the end of the service closes the client's connection",
        "_forward_answers",
        "near.sendall(data)",
        "near.sendall(data)\n        near.close()",
    ),
    _mistake(
        "what is sent after the service's end is an error",
        "_forward_requests",
        "is_alive = False",
        "raise",
    ),
    _mistake(
        "the number of the gate is read in one piece",
        "CoordinatorProxy._prove",
        "while len(nonce) < NONCE_BYTES:",
        "if not nonce:",
    ),
    _mistake(
        "a service that starts late is given up at once",
        "_connect",
        "if time.monotonic() >= until:",
        "if True:",
    ),
    _mistake("a closed proxy accepts on", "CoordinatorProxy.close", "self._listener.close()", "pass"),
)
