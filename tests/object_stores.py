"""Object stores for tests: real servers of their own on this machine, one for S3 and one for Google's API."""

import contextlib
import importlib.util
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import fsspec
import pytest

from tests.cluster._workers import free_ports

BUCKET = "unisono-test"
_LIMIT = 240.0


def variables(scheme, port):
    """The environment of programs that use the server on a port."""
    if scheme == "s3":
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "of-a-test",
            "AWS_SECRET_ACCESS_KEY": "of-a-test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
    return {
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
        "FSSPEC_GS_TOKEN": "anon",
        # Otherwise gcsfs asks Google's own servers, by gRPC, what kind of bucket it is.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }


@contextlib.contextmanager
def object_store(scheme):
    """Start a server with an empty bucket and set the environment; yield the bucket's address.

    `memory` is the store that fsspec has in this process: it needs no server.
    """
    if scheme == "memory":
        yield f"memory://{BUCKET}"
        fsspec.filesystem(scheme).store.clear()
        return
    needed = ("s3fs", "moto") if scheme == "s3" else ("gcsfs", "gcp_storage_emulator")
    # Not `importorskip`: gcsfs reads its variables when it is imported.
    if not all(map(importlib.util.find_spec, needed)):
        pytest.skip(f"needs {' and '.join(needed)}")
    (port,) = free_ports(1)
    if scheme == "s3":
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    else:
        program = Path(sys.executable).with_name("gcp-storage-emulator")
        command = [sys.executable, str(program), "start", "--host=127.0.0.1", f"--port={port}", "--in-memory"]
        command += [f"--default-bucket={BUCKET}"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(server, port)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables(scheme, port).items():
                patch.setenv(name, value)
            fsspec.config.set_conf_env(fsspec.config.conf)
            client = fsspec.filesystem(scheme, use_listings_cache=False)
            if scheme == "s3":
                client.mkdir(BUCKET)
            yield f"{scheme}://{BUCKET}"
        # The next server of this process has another port.
        type(client).clear_instance_cache()
        fsspec.config.conf.pop(scheme, None)
    finally:
        server.terminate()
        server.wait(_LIMIT)


def _wait(server, port):
    deadline = time.monotonic() + _LIMIT
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=_LIMIT).close()
            return
        except urllib.error.HTTPError as error:
            error.close()
            return
        except OSError:
            assert server.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.02)


def objects(address):
    """The names of all objects below an address."""
    scheme, _, key = address.partition("://")
    client = fsspec.filesystem(scheme, use_listings_cache=False)
    return sorted(name.lstrip("/").removeprefix(f"{key}/") for name in client.find(key))
