"""What `unisono doctor` says of machines that this one is not."""

import os
import types

import pytest

import unisono
from unisono.cli import _doctor, _launch_function
from unisono.cli import _machine_checks as checks


def test_a_version_outside_of_the_range_names_what_to_install():
    requires = ["keras<3.17,>=3.15", "rich>=13", 'pyzmq>=26; extra == "cluster"']
    assert checks.versions(requires, {"keras": "3.15.1", "rich": "13"}.get) == "in the supported range"
    for found in ("3.14.0", "3.17.0", None):
        with pytest.raises(unisono.MissingPackageError, match=r"pip install 'keras<3.17,>=3.15'"):
            checks.versions(requires, {"keras": found, "rich": "13"}.get)


def test_a_jax_for_cpus_beside_a_gpu(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\n")
    with pytest.raises(unisono.MissingPackageError, match=r"2 GPUs .* pip install 'unisono\[cuda12\]'"):
        checks.gpus("cpu", {}, tmp_path, driver)
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n")
    with pytest.raises(unisono.MissingPackageError, match=r"'unisono\[cuda13\]'"):
        checks.gpus("cpu", {}, tmp_path, driver)
    assert checks.gpus("gpu", {}, tmp_path, driver) == "2 GPUs of NVIDIA, used by JAX"
    assert "JAX_PLATFORMS=cpu" in checks.gpus("cpu", {"JAX_PLATFORMS": "cpu"}, tmp_path, driver)
    assert checks.gpus("cpu", {"CUDA_VISIBLE_DEVICES": ""}, tmp_path, driver).startswith("none")


def test_the_shared_memory_of_a_container(tmp_path, monkeypatch):
    assert "not there" in checks.shared_memory(tmp_path / "absent")
    assert " GB free" in checks.shared_memory(tmp_path)
    little = types.SimpleNamespace(f_blocks=1 << 14, f_bavail=1 << 13, f_frsize=1 << 12)
    monkeypatch.setattr(os, "statvfs", lambda path: little)
    with pytest.raises(unisono.InvalidArgumentError, match=r"0.0336 of 0.0671 GB free.*--shm-size=1g"):
        checks.shared_memory(tmp_path)


def test_a_name_that_nobody_knows():
    def unknown(name):
        raise OSError(-2, "Name or service not known")

    assert "not known here (Name or service not known)" in checks.host_name("box", unknown)
    assert checks.host_name("box", lambda name: ["10.0.0.7"]) == "'box' is 10.0.0.7"


def test_keys_are_named_and_not_shown(tmp_path):
    environ = {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": "hidden"}
    (tmp_path / ".config/gcloud").mkdir(parents=True)
    (tmp_path / ".config/gcloud/application_default_credentials.json").write_text("{}")
    text = checks.cloud_keys(environ, tmp_path)
    assert text.startswith(
        "gs:// ~/.config/gcloud/application_default_credentials.json; s3:// AWS_ACCESS_KEY_ID"
    )
    assert "AKIA" not in text
    assert "hidden" not in text
    with pytest.raises(unisono.InvalidArgumentError, match="GOOGLE_APPLICATION_CREDENTIALS must name a file"):
        checks.cloud_keys({"GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "absent")}, tmp_path)


def test_what_an_all_reduce_of_a_model_takes(monkeypatch):
    calls = []

    def launch(fn, args, timeout, **where):
        calls.append((args, where))
        # The second process is the slower one.
        return [[0.001, 0.100], [0.002, 0.130]]

    monkeypatch.setattr(_launch_function, "launch", launch)
    link, model = (f.text for f in _doctor.between(None, ["a", "b:3333"], 1024 * 1.048576))
    assert calls == [(([4, 256 << 20],), {"cluster": {"worker": ["a:2222", "b:3333"]}})]
    assert link == "2 ms for 4 bytes, 2.1 GB/s for 268.435 MB"
    # Four times what was measured.
    assert model == "514 ms for 1073.74 MB of gradients, once a step"
    with pytest.raises(unisono.InvalidArgumentError, match="-n 2"):
        _doctor.between(1, [], 100.0)


def test_links_are_of_one_kind():
    from typer.testing import CliRunner

    from unisono.cli._app import app

    done = CliRunner().invoke(app, ["doctor", "-n", "2", "--hosts", "a,b"])
    assert isinstance(done.exception, unisono.InvalidArgumentError)
