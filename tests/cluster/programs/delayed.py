"""Three lines, with delays at points of the start and the end where processes wait for each other."""

import functools
import json
import os
import time

import unisono
from unisono.cluster.rendezvous import _server
from unisono.cluster import _distributed, _jax_process_group
from unisono.cluster.rendezvous import _client
from unisono.cluster.liveness import _peer_monitor

#: After what each worker sleeps for how many seconds; another one than at the same point elsewhere.
DELAYS = [
    {"_connect": 0.5, "_start_jax": 0.2, "_drain": 0.5},
    {"_start_jax": 0.5, "gather": 1.5, "_read_result": 0.3},
    {"_connect": 0.5, "rendezvous": 0.5, "wait_for_shutdown": 0.5},
]
OWNERS = {
    _client.RendezvousClient: ["_connect"],
    _client: ["_read_result"],
    _server.RendezvousServer: ["_drain"],
    _distributed: ["rendezvous", "_start_jax"],
    _jax_process_group.HostCollectives: ["gather"],
    _peer_monitor.PeerMonitor: ["wait_for_shutdown"],
}
delays = DELAYS[json.loads(os.environ["TF_CONFIG"])["task"]["index"]]


def delayed(function, seconds):
    @functools.wraps(function)
    def slow(*args, **kwargs):
        result = function(*args, **kwargs)
        time.sleep(seconds)
        return result

    return slow


for owner, names in OWNERS.items():
    for name in names:
        setattr(owner, name, delayed(getattr(owner, name), delays.get(name, 0.0)))

strategy = unisono.MultiWorkerMirroredStrategy()
print("replicas:", strategy.num_replicas_in_sync)
