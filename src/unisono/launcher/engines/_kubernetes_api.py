"""Kubernetes' API through the official client, of which all versions take and return plain objects.

Tests: tests/unit/launcher/engines/test_kubernetes.py.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unisono._errors import ClusterError, InvalidArgumentError
from unisono.cluster_resolver._kubernetes import KubernetesExecutableLocation, configured_client
from unisono.launcher.engines._kubernetes_manifests import Manifest

#: Where a pod finds the name of its namespace.
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
#: Seconds to connect, and for an answer. A log may be silent for longer: then it is asked for again.
_TIMEOUT, _LOG_TIMEOUT = (10.0, 30.0), (10.0, 300.0)
_CHUNK = 1 << 16
#: How the client reports the answer to a request for a connection.
_HANDSHAKE = re.compile("Handshake status ([0-9]{3})")
#: Advice where the cluster refuses an object, by the code of HTTP.
_ADVICE = {
    0: "See `kubectl cluster-info`, which must reach the cluster.",
    401: "Log in again: `kubectl auth whoami` must work.",
    403: "Ask for the right, or pass another `--namespace`.",
    404: "Pass a `--namespace` that exists, and `--kind job` where JobSet or Kubeflow Trainer is missing.",
    409: "Delete what is there (`kubectl delete KIND NAME`), or pass another `--name`.",
}


class ApiError(ClusterError):
    """The API server refuses a request, or cannot be reached.

    Args:
        status: the code of HTTP; 0 without an answer.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def refusal(error: ApiError, what: str) -> InvalidArgumentError:
    """Return the error for a user whose launch the cluster does not take."""
    advice = _ADVICE.get(error.status, "See `unisono launch --on kubernetes … --print`.")
    return InvalidArgumentError(f"Kubernetes must take {what}. Received: {error}. {advice}")


class KubernetesApi:
    """The part of Kubernetes' API that a launch uses, in one namespace.

    Args:
        namespace: None for `kubectl`'s context's, or this pod's.

    Raises:
        BackendError: the client is not installed, or finds no way to the cluster.
    """

    def __init__(self, environ: Mapping[str, str], namespace: str | None) -> None:
        within = "KUBERNETES_SERVICE_HOST" in environ and "KUBECONFIG" not in environ
        places = KubernetesExecutableLocation
        client = configured_client(places.WITHIN_CLUSTER if within else places.OFF_CLUSTER)
        # The requests of the generated classes differ between versions; this one takes a path.
        dynamic = importlib.import_module("kubernetes.dynamic")
        self._client = dynamic.DynamicClient(client.ApiClient(), discoverer=lambda *_: None)
        self._refused = importlib.import_module("kubernetes.client.exceptions").ApiException
        self._unreached = importlib.import_module("urllib3.exceptions").HTTPError
        self.namespace = namespace or _default_namespace(within)

    def create(self, manifest: Manifest) -> None:
        """Create an object."""
        self._request("post", self._path(manifest), manifest)

    def delete(self, manifest: Manifest) -> None:
        """Delete an object, and what it owns; nothing where there is none."""
        path = f"{self._path(manifest)}/{manifest['metadata']['name']}"
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        try:
            self._request("delete", path, options)
        except ApiError as error:
            if error.status != 404:
                raise

    def conditions(self, manifest: Manifest) -> dict[str, str]:
        """Return the conditions of an object that hold, with their messages."""
        status = self._request("get", f"{self._path(manifest)}/{manifest['metadata']['name']}").get(
            "status", {}
        )
        holding = [each for each in status.get("conditions") or () if each["status"] == "True"]
        return {each["type"]: each.get("message", "") for each in holding}

    def pods(self, selector: str) -> list[Manifest]:
        """Return the pods with a label."""
        answer = self._request("get", f"{self._pods}", labelSelector=selector)
        pods: list[Manifest] = answer["items"]
        return pods

    def log(self, pod: str, container: str, since: int | None) -> Iterator[bytes]:
        """Yield what a container prints, until it ends."""
        query = {"container": container, "follow": "true"}
        query |= {} if since is None else {"sinceSeconds": str(since)}
        response = self._send("get", f"{self._pods}/{pod}/log", None, query, _LOG_TIMEOUT)
        try:
            yield from response.stream(_CHUNK)
        except self._unreached as error:
            raise ApiError(0, str(error)) from error
        finally:
            response.release_conn()

    def output(self, pod: str, container: str, command: list[str]) -> Any:
        """Start a program in a container; return the client's `WSClient`, which has its output.

        Raises:
            ApiError: the program cannot be started.
        """
        stream, websocket = map(importlib.import_module, ("kubernetes.stream", "websocket"))
        core = importlib.import_module("kubernetes.client").CoreV1Api(self._client.client)
        # The client passes no bound on to the connection, which would have none.
        before = websocket.getdefaulttimeout()
        websocket.setdefaulttimeout(_TIMEOUT[0])
        try:
            return stream.stream(
                core.connect_get_namespaced_pod_exec, pod, self.namespace, container=container,
                command=command, stdin=False, stdout=True, stderr=False, tty=False, _preload_content=False,
            )  # fmt: skip
        except self._refused as error:
            code = _HANDSHAKE.search(str(error.reason))
            raise ApiError(int(code[1]) if code else error.status or 0, str(error.reason)[:300]) from error
        finally:
            websocket.setdefaulttimeout(before)

    def check_rights(self, manifests: list[Manifest]) -> None:
        """Check that this user may create and delete objects, and read pods.

        Raises:
            InvalidArgumentError: the message names the first right that is missing.
        """
        needed = {("list", "", "pods", ""): None, ("get", "", "pods", "log"): None}
        for manifest in manifests:
            group, _, _ = manifest["apiVersion"].rpartition("/")
            needed |= {(verb, group, _plural(manifest), ""): None for verb in ("create", "delete")}
        for verb, group, resource, part in needed:
            asked = {"namespace": self.namespace, "verb": verb, "group": group, "resource": resource}
            review = {"spec": {"resourceAttributes": asked | {"subresource": part}}}
            kind = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
            answer = self._request(
                "post", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", kind | review
            )
            if not answer["status"].get("allowed"):
                name = ".".join(filter(None, [f"{resource}/{part}".strip("/"), group]))
                message = f"this user may not {verb} {name} in the namespace {self.namespace!r}"
                raise refusal(ApiError(403, message), "the launch")

    @property
    def _pods(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    def _path(self, manifest: Manifest) -> str:
        version = manifest["apiVersion"]
        prefix = "/apis" if "/" in version else "/api"
        return f"{prefix}/{version}/namespaces/{self.namespace}/{_plural(manifest)}"

    def _request(self, method: str, path: str, body: Manifest | None = None, **query: str) -> Manifest:
        answer: Manifest = json.loads(self._send(method, path, body, query, _TIMEOUT).data)
        return answer

    def _send(
        self,
        method: str,
        path: str,
        body: Manifest | None,
        query: Mapping[str, str],
        timeout: tuple[float, float],
    ) -> Any:
        """Return urllib3's response."""
        try:
            return self._client.request(
                method,
                path,
                body=body,
                query_params=list(query.items()),
                serialize=False,
                _request_timeout=timeout,
            )
        except self._refused as error:
            raise ApiError(error.status or 0, _message(error)) from error
        except self._unreached as error:
            raise ApiError(0, str(error)) from error


def _plural(manifest: Manifest) -> str:
    return f"{manifest['kind'].lower()}s"


def _message(error: Any) -> str:
    """Return the server's message, or else the code."""
    try:
        return str(json.loads(error.body)["message"])
    except (KeyError, TypeError, ValueError):
        return f"{error.status} {error.reason}"


def _default_namespace(within: bool) -> str:
    if within:
        return _OWN_NAMESPACE.read_text().strip()
    _, active = importlib.import_module("kubernetes.config").list_kube_config_contexts()
    return str(active["context"].get("namespace") or "default")
