"""A stand-in for Kubernetes: its API over loopback, and pods as Kubernetes makes them of objects.

What it knows of Kubernetes: an indexed Job has a pod for each index, called `job-index`; a StatefulSet, too;
a JobSet has Jobs called `set-job-0`; Kubeflow Trainer makes a JobSet of a TrainJob and its runtime. The
kubelet replaces `$(NAME)` by an earlier variable.
"""

import base64
import collections
import contextlib
import dataclasses
import hashlib
import http.client
import json
import re
import select
import signal
import struct
import threading
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from tests import forked
from unisono.launcher._processes import free_ports

INDEX = "batch.kubernetes.io/job-completion-index"
JOBSET = "jobset.sigs.k8s.io/jobset-name"
GROUPS = ("api", "batch", "apps", "jobset.x-k8s.io", "trainer.kubeflow.org")


@dataclasses.dataclass
class Pod:
    """A pod with one container.

    Args:
        host: the name at which the others reach it.
        env: of its container.
        probes: of its container, by name.
        owner: the name of the object that was created.
        job: the spec of its Job, None for a StatefulSet's.
    """

    name: str
    host: str
    labels: dict
    annotations: dict
    command: list
    env: dict
    probes: dict
    owner: str = ""
    job: dict | None = None


def pods_of(objects):
    """The pods that controllers make of a list of objects."""
    secrets = {o["metadata"]["name"]: o["stringData"] for o in objects if o["kind"] == "Secret"}
    runtimes = {
        o["metadata"]["name"]: o["spec"]["template"]["spec"]
        for o in objects
        if o["kind"] == "TrainingRuntime"
    }
    found = []
    for each in objects:
        before = len(found)
        name, spec = each["metadata"]["name"], each.get("spec", {})
        if each["kind"] == "Job":
            found += _of_job(name, spec, spec["template"]["spec"]["subdomain"], {}, secrets)
        elif each["kind"] == "StatefulSet":
            for index in range(spec["replicas"]):
                labels = {"apps.kubernetes.io/pod-index": str(index)}
                found.append(
                    _pod(f"{name}-{index}", spec["serviceName"], spec["template"], labels, {}, secrets)
                )
        elif each["kind"] == "JobSet":
            found += _of_jobset(name, spec, secrets)
        elif each["kind"] == "TrainJob" and spec["runtimeRef"]["kind"] == "TrainingRuntime":
            found += _of_jobset(name, runtimes[spec["runtimeRef"]["name"]], secrets)
        elif each["kind"] == "TrainJob":
            found += _of_jobset(name, _with_trainer(name, spec["trainer"]), secrets)
        for pod in found[before:]:
            pod.owner = name
    return found


def _with_trainer(name, trainer):
    """The runtime `jax-distributed` with what a TrainJob says, as Kubeflow's plug-in for JAX does."""
    source = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
    env = [
        {"name": "JAX_NUM_PROCESSES", "value": str(trainer["numNodes"])},
        {"name": "JAX_PROCESS_ID", "valueFrom": source},
        {"name": "JAX_COORDINATOR_ADDRESS", "value": f"{name}-node-0-0.{name}:29500"},
    ]
    container = {"name": "node", "command": trainer["command"], "env": [*env, *trainer["env"]]}
    job = {"completions": trainer["numNodes"], "template": {"spec": {"containers": [container]}}}
    return {"replicatedJobs": [{"name": "node", "template": {"spec": job}}]}


def _of_jobset(name, spec, secrets):
    domain = spec.get("network", {}).get("subdomain", name)
    labels = {JOBSET: name, "jobset.sigs.k8s.io/restart-attempt": "0"}
    return [
        pod
        for job in spec["replicatedJobs"]
        for pod in _of_job(f"{name}-{job['name']}-0", job["template"]["spec"], domain, labels, secrets)
    ]


def _of_job(name, spec, domain, labels, secrets):
    pods = [
        _pod(f"{name}-{index}", domain, spec["template"], labels, {INDEX: str(index)}, secrets)
        for index in range(spec["completions"])
    ]
    return [dataclasses.replace(pod, job=spec) for pod in pods]


def _pod(name, domain, template, labels, annotations, secrets):
    [container] = template["spec"]["containers"]
    labels = labels | template.get("metadata", {}).get("labels", {})
    fields = {f"metadata.labels['{k}']": v for k, v in labels.items()}
    fields |= {f"metadata.annotations['{k}']": v for k, v in annotations.items()}
    env = {}
    for each in container["env"]:
        match each.get("valueFrom", {}):
            case {"fieldRef": field}:
                env[each["name"]] = fields[field["fieldPath"]]
            case {"secretKeyRef": key}:
                env[each["name"]] = secrets[key["name"]][key["key"]]
            case _:
                env[each["name"]] = _expanded(each["value"], env)
    command = [_expanded(word, env) for word in container["command"]]
    probes = {name: value for name, value in container.items() if name.endswith("Probe")}
    return Pod(name, f"{name}.{domain}", labels, annotations, command, env, probes)


def _expanded(text, env):
    return re.sub(r"\$\$|\$\(([A-Za-z_]\w*)\)", lambda m: "$" if m[1] is None else env.get(m[1], m[0]), text)


class ApiServer:
    """An API server over loopback, in one namespace.

    Args:
        groups: the API groups that are installed.
        denied: pairs of a verb and a resource that the user has no right to.
        moments: what each look at the pods finds, the last one for ever: pairs of the pods' states and the
            conditions of what owns them, by name. A state is a container's, or a pod's whole status.
        at: called with the number of each look at the pods.
        unavailable: asked at each look whether the server answers with 503.
    """

    def __init__(self, groups=GROUPS, denied=(), moments=(), at=lambda look: None, unavailable=lambda: False):
        self.groups, self.denied, self.moments, self.at = groups, set(denied), list(moments), at
        self.unavailable = unavailable
        self.objects, self.deleted, self.logs = {}, [], {}
        self.looks = 0
        #: The bytes of files in pods, by pod and path.
        self.files = {}

    def objects_of(self, kind):
        """The objects of a kind that were created."""
        return [o for o in self.objects.values() if o["kind"] == kind]

    def pods(self):
        """The pods' objects at this moment."""
        states, _ = self._moment()
        return [
            self._item(pod, states[pod.name])
            for pod in pods_of(list(self.objects.values()))
            if pod.name in states
        ]

    def _item(self, pod, status):
        metadata = {"name": pod.name, "uid": pod.name, "labels": pod.labels, "annotations": pod.annotations}
        metadata["creationTimestamp"] = "2026-01-01T00:00:00Z"
        if not {"phase", "conditions"} & set(status):
            status = {"containerStatuses": [{"name": "node", "restartCount": 0, "state": status}]}
        return {"metadata": metadata, "status": status}

    def conditions_of(self, name):
        """The conditions of an object that hold at this moment, with their messages."""
        return self._moment()[1].get(name, {})

    def _moment(self):
        return self.moments[max(0, min(self.looks, len(self.moments)) - 1)]

    def log_of(self, pod):
        """Yield what a pod prints until it ends."""
        yield self.logs.get(pod, b"")

    def output_of(self, pod, command):
        """Yield what `tail -c +N -F FILE` prints in a pod; empty while there is nothing new."""
        tail, count, begin, follow, path = command
        assert (tail, count, follow, begin[0]) == ("tail", "-c", "-F", "+")
        position = int(begin) - 1
        while True:
            data = self.file_of(pod, path)[position:]
            yield data
            position += len(data)
            time.sleep(0.01)

    def file_of(self, pod, path):
        """The bytes of a file in a pod."""
        return bytes(self.files.get((pod, path), b""))

    @contextlib.contextmanager
    def serving(self, folder):
        """Serve; yield the file that names this server for `kubectl`."""
        api = self

        class Handler(_Handler):
            cluster = api

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        path = folder / "kubeconfig"
        cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
        context = {"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "lab"}}
        user = {"name": "u", "user": {"token": "t"}}
        config = {"apiVersion": "v1", "kind": "Config", "current-context": "x"}
        path.write_text(json.dumps(config | {"clusters": [cluster], "contexts": [context], "users": [user]}))
        try:
            yield path
        finally:
            server.shutdown()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    cluster: ApiServer
    protocol_version = "HTTP/1.1"
    # Else the body of an answer waits 40 ms for the client to acknowledge its headers.
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def do_GET(self):
        path = urlsplit(self.path)
        query = parse_qs(path.query)
        *_, kind, name = path.path.rsplit("/", 2)
        if path.path.endswith("/pods") and self.cluster.unavailable():
            self._answer(503, {"message": "the server is starting"})
        elif path.path.endswith("/pods"):
            self._refuse_or("list", "pods", self._pods, query["labelSelector"][0])
        elif name == "log":
            self._refuse_or("get", "pods/log", self._log, kind)
        elif name == "exec":
            self._refuse_or("get", "pods/exec", lambda pod: self._exec(pod, query["command"]), kind)
        else:
            held = [
                {"type": t, "status": "True", "message": m}
                for t, m in self.cluster.conditions_of(name).items()
            ]
            self._answer(200, {"status": {"conditions": held}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["kind"] == "SelfSubjectAccessReview":
            asked = body["spec"]["resourceAttributes"]
            resource = "/".join(filter(None, [asked["resource"], asked["subresource"]]))
            self._answer(201, {"status": {"allowed": (asked["verb"], resource) not in self.cluster.denied}})
            return
        _, prefix, *rest = self.path.split("/")
        name = body["metadata"]["name"]
        if (prefix if prefix == "api" else rest[0]) not in self.cluster.groups:
            self._answer(404, {"message": "the server could not find the requested resource"})
        elif "/namespaces/lab/" not in self.path:
            self._answer(404, {"message": f'namespaces "{rest[rest.index("namespaces") + 1]}" not found'})
        elif (body["kind"], name) in self.cluster.objects:
            self._answer(409, {"message": f'"{name}" already exists'})
        else:
            self.cluster.objects[body["kind"], name] = body
            self._answer(201, body)

    def do_DELETE(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        *_, plural, name = self.path.split("/")
        [key] = [k for k in self.cluster.objects if (k[0].lower() + "s", k[1]) == (plural, name)]
        self.cluster.deleted.append(self.cluster.objects.pop(key))
        self._answer(200, {"kind": "Status", "status": "Success"})

    def _refuse_or(self, verb, resource, answer, argument):
        if (verb, resource) in self.cluster.denied:
            self._answer(403, {"message": f"cannot {verb} {resource}"})
        else:
            answer(argument)

    def _pods(self, selector):
        self.cluster.looks += 1
        self.cluster.at(self.cluster.looks)
        label, _, value = selector.partition("=")
        items = [pod for pod in self.cluster.pods() if pod["metadata"]["labels"].get(label) == value]
        self._answer(200, {"kind": "PodList", "items": items})

    def _log(self, pod):
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(OSError):
            for part in self.cluster.log_of(pod):
                if part:
                    self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                    self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def _exec(self, pod, command):
        """Send what a program prints, as binary frames of a WebSocket, until the client closes it."""
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Protocol", "v4.channel.k8s.io")
        self.send_header("Sec-WebSocket-Accept", accept)
        self.end_headers()
        self.wfile.flush()
        with contextlib.suppress(OSError):
            for data in self.cluster.output_of(pod, command):
                if select.select([self.connection], [], [], 0)[0]:
                    break
                for part in (data[i : i + 60_000] for i in range(0, len(data), 60_000)):
                    # The first byte is the channel: the standard output.
                    self.wfile.write(struct.pack("!BBH", 0x82, 126, len(part) + 1) + b"\x01" + part)
                    self.wfile.flush()
        self.close_connection = True

    def _answer(self, status, body):
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


class LocalNode(ApiServer):
    """A cluster of one node, whose containers are processes of this machine; names are ports of loopback.

    Of controllers it has what a launch needs: a pod that ends with an exit code that its policy ignores is
    replaced, and one that fails is replaced as often as its Job says. A JobSet does not start again.

    Args:
        folder: where the programs run, and for logs.
        mounts: replaces the directory at which pods find their volume.
    """

    def __init__(self, folder, mount):
        super().__init__()
        self._folder, self._mount = folder, str(mount)
        self._addresses, self._running, self._gone, self._failures = {}, {}, {}, collections.Counter()
        # Each request has a thread of its own, and that for a log stays.
        self._lock = threading.Lock()
        self._probed = {}
        #: Names of pods that wait for a node.
        self.held = set()

    def pods(self):
        with self._lock:
            return self._pods()

    def _pods(self):
        wanted = {pod.name: pod for pod in pods_of(list(self.objects.values()))}
        for pod in wanted.values():
            if pod.name not in self._addresses:
                taken = [port for _, port in self._addresses.values()] + [*self._probed.values()]
                port, self._probed[pod.name] = free_ports(2, avoid=taken)
                self._addresses[pod.name] = (pod.host, port)
        for name, pod in wanted.items():
            code = self._code(name) if name in self._running else None
            if code and self._is_replaced(pod, code):
                self._failures[name] += not self._is_ignored(pod, code)
                self._gone[name, self._running[name][1]] = (pod, code)
                del self._running[name]
            if name not in self._running and name not in self.held:
                number = sum(gone[0] == name for gone in self._gone)
                self._running[name] = (self._start(pod, number), number, pod)
        for name in self._running.keys() - wanted.keys():
            if self._code(name) is None:
                self._running[name][0].send_signal(signal.SIGTERM)
            else:
                del self._running[name]
        ended = [self._ended(pod, number, code) for (_, number), (pod, code) in self._gone.items() if wanted]
        return ended + [self._present(name) for name in self._running]

    def _code(self, name):
        code = self._running[name][0].poll()
        return 128 - code if code is not None and code < 0 else code

    def _is_replaced(self, pod, code):
        return self._is_ignored(pod, code) or self._failures[pod.name] < pod.job.get(
            "backoffLimitPerIndex", 0
        )

    def _is_ignored(self, pod, code):
        rules = pod.job.get("podFailurePolicy", {"rules": []})["rules"]
        return any(code in rule.get("onExitCodes", {"values": ()})["values"] for rule in rules)

    def _start(self, pod, number):
        env = {name: value.replace("/unisono/", f"{self._mount}/") for name, value in pod.env.items()}
        for host, port in self._addresses.values():
            env = {name: re.sub(rf"{host}:\d+", f"127.0.0.1:{port}", value) for name, value in env.items()}
        assert pod.command[0] == "python"
        if "UNISONO_HEALTH_PORT" in env:
            env["UNISONO_HEALTH_PORT"] = str(self._probed[pod.name])
        log = self._log(pod.name, number)
        return forked.Program(pod.command[1:], self._folder, log, env=forked.environment(**env))

    def _log(self, name, number):
        return self._folder / f"{name}.{number}.log"

    def _present(self, name):
        _, number, pod = self._running[name]
        code = self._code(name)
        return self._item(pod, {"running": {}}, number) if code is None else self._ended(pod, number, code)

    def _ended(self, pod, number, code):
        log = self._log(pod.name, number)
        at = datetime.fromtimestamp(int(log.stat().st_mtime), UTC).isoformat()
        state = {"exitCode": code, "finishedAt": at, "message": log.read_text()[-2048:] if code else ""}
        return self._item(pod, {"terminated": state}, number)

    def _item(self, pod, status, number=0):
        item = super()._item(pod, status)
        # The API's names of pods are unique, their host names are not.
        metadata = {"name": f"{pod.name}.{number}", "uid": f"{pod.name}.{number}"}
        metadata["creationTimestamp"] = f"2026-01-01T00:00:0{number}Z"
        return item | {"metadata": item["metadata"] | metadata}

    def probe(self, name, probe):
        """The status that a running pod answers to one of its probes; None where nothing listens."""
        if name not in self._running:
            return None
        path = self._running[name][2].probes[probe]["httpGet"]["path"]
        connection = http.client.HTTPConnection("127.0.0.1", self._probed[name], timeout=60)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except ConnectionError:
            return None
        finally:
            connection.close()

    def conditions_of(self, name):
        with self._lock:
            running = {each: pod for each, (_, _, pod) in self._running.items() if pod.owner == name}
            pods = [(pod, self._code(each)) for each, pod in running.items()]
        if any(code and not self._is_replaced(pod, code) for pod, code in pods):
            return {"Failed": "a pod has failed"}
        deciding = [code for pod, code in pods if "-ps-" not in pod.name]
        return {"Complete": ""} if deciding and not any(code != 0 for code in deciding) else {}

    def log_of(self, pod):
        name, _, number = pod.rpartition(".")
        with self._log(name, number).open("rb") as file:
            while True:
                ended = self._has_ended(name, int(number))
                yield file.read()
                if ended:
                    return
                time.sleep(0.05)

    def file_of(self, pod, path):
        try:
            return Path(path.replace("/unisono/", f"{self._mount}/")).read_bytes()
        except OSError:
            return b""

    def _has_ended(self, name, number):
        with self._lock:
            gone = (name, number) in self._gone or name not in self._running
            return gone or self._code(name) is not None

    def close(self):
        """End all containers."""
        for program, _, _ in self._running.values():
            program.kill()
