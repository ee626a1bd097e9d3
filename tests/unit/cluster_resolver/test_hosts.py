"""SageMaker's and SkyPilot's hosts, as their documentation shows them."""

import json
import re
from pathlib import Path

import pytest

from unisono import InvalidArgumentError
from unisono.cluster_resolver import SageMakerClusterResolver, SkyPilotClusterResolver, _hosts, resolve

SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-10", "algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "8"}
#: https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html
RESOURCES = {
    "current_host": "algo-1",
    "hosts": ["algo-2", "algo-1"],
    "network_interface_name": "eth0",
    "current_instance_type": "ml.p4d.24xlarge",
    "current_group_name": "homogeneousCluster",
}
SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.9\n10.0.0.4",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "4",
}


@pytest.fixture
def resources(tuned, tmp_path):
    path = tmp_path / "resourceconfig.json"
    tuned(_hosts, RESOURCES=path)
    return path


def test_sagemakers_toolkit():
    found = resolve(dict(SAGEMAKER))
    assert type(found) is SageMakerClusterResolver
    # Sorted, so that the order is the same on all hosts.
    assert found.cluster_spec() == {"worker": ["algo-1:2222", "algo-10:2222", "algo-2:2222"]}
    assert (found.process_id, found.num_processes, found.coordinator_address) == (2, 3, "algo-1:2222")
    assert (found.environment, found.num_accelerators()) == ("sagemaker", {"GPU": 8})
    assert SageMakerClusterResolver(environ=SAGEMAKER | {"SM_NUM_GPUS": "0"}).num_accelerators() == {}


def test_a_container_without_the_toolkit(resources):
    assert resolve({"TRAINING_JOB_ARN": "arn"}) is None
    resources.write_text(json.dumps(RESOURCES))
    assert resolve({}) is None
    found = resolve({"TRAINING_JOB_ARN": "arn"})
    assert found.cluster_spec() == {"worker": ["algo-1:2222", "algo-2:2222"]}
    assert found.process_id == 0


def test_skypilots_nodes_keep_their_order():
    found = resolve(dict(SKYPILOT))
    assert type(found) is SkyPilotClusterResolver
    assert found.cluster_spec() == {"worker": ["10.0.0.9:2222", "10.0.0.4:2222"]}
    assert (found.process_id, found.environment, found.num_accelerators()) == (1, "skypilot", {"GPU": 4})
    assert SkyPilotClusterResolver(environ=SKYPILOT | {"SKYPILOT_NODE_IPS": "fd00::1\nfd00::2"}).master() == (
        "[fd00::2]:2222"
    )


def test_the_port_is_a_variable_or_an_argument():
    environ = SKYPILOT | {"UNISONO_PORT": "4000"}
    assert resolve(environ).coordinator_address == "10.0.0.9:4000"
    assert SkyPilotClusterResolver(5000, environ).coordinator_address == "10.0.0.9:5000"
    for port in ("0", "65536", "http"):
        with pytest.raises(InvalidArgumentError, match=f"UNISONO_PORT must be .*Received: '{port}'"):
            resolve(SKYPILOT | {"UNISONO_PORT": port})


@pytest.mark.parametrize(
    "environ",
    [
        {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
        {"SKYPILOT_NODE_IPS": "10.0.0.9\n", "SKYPILOT_NODE_RANK": "0"},
    ],
)
def test_one_host_is_no_cluster(environ):
    assert resolve(environ) is None


@pytest.mark.parametrize(
    ("environ", "received"),
    [
        ({"SM_HOSTS": '["algo-1", "algo-2"]'}, "this host None from SM_HOSTS"),
        (SAGEMAKER | {"SM_CURRENT_HOST": "algo-3"}, "this host 'algo-3'"),
        (SAGEMAKER | {"SM_HOSTS": "algo-1,algo-2"}, "SM_HOSTS='algo-1,algo-2'"),
        (SAGEMAKER | {"SM_HOSTS": "3"}, "hosts 3 "),
        ({"SKYPILOT_NODE_IPS": "a\nb"}, "SKYPILOT_NODE_RANK=None"),
        (SKYPILOT | {"SKYPILOT_NODE_RANK": "2"}, "SKYPILOT_NODE_RANK='2'"),
        # Each of these nodes would train alone.
        (SKYPILOT | {"SKYPILOT_NODE_IPS": "a,b", "SKYPILOT_NODE_RANK": "0"}, "SKYPILOT_NODE_IPS='a,b'"),
        (SKYPILOT | {"SKYPILOT_NUM_NODES": "1"}, "SKYPILOT_NUM_NODES='1'"),
        ({"SKYPILOT_NODE_IPS": "a", "SKYPILOT_NODE_RANK": "1"}, "SKYPILOT_NODE_RANK='1'"),
        ({"SKYPILOT_NODE_IPS": "a", "SKYPILOT_NODE_RANK": "x"}, "SKYPILOT_NODE_RANK='x'"),
    ],
)
def test_what_cannot_be_used(environ, received):
    with pytest.raises(InvalidArgumentError, match=re.escape(received)):
        resolve(environ)


@pytest.mark.parametrize("text", ["{", "[]", '{"hosts": ["a"]}', '{"hosts": ["a"], "current_host": "c"}'])
def test_a_file_that_cannot_be_used(resources, text):
    resources.write_text(text)
    with pytest.raises(InvalidArgumentError, match=r"which of them this is.*resourceconfig"):
        resolve({"TRAINING_JOB_ARN": "arn"})


def test_what_a_user_starts_there_goes_first():
    """On SageMaker and SkyPilot one may start `mpirun`, or set JAX's variables."""
    jax = {"JAX_COORDINATOR_ADDRESS": "c:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
    assert resolve(SKYPILOT | jax).coordinator_address == "c:1"
    assert resolve(SAGEMAKER | jax).coordinator_address == "c:1"


def test_the_job_of_the_document_is_one_of_sagemakers_api():
    botocore = pytest.importorskip("botocore.session")
    validate = pytest.importorskip("botocore.validate")
    page = Path(__file__).parents[3] / "docs" / "clouds.md"
    [text] = re.findall(r"```json\n(.*?)```", page.read_text(), re.DOTALL)
    model = botocore.get_session().get_service_model("sagemaker")
    shape = model.operation_model("CreateTrainingJob").input_shape
    assert not validate.ParamValidator().validate(json.loads(text), shape).has_errors()
    assert validate.ParamValidator().validate({**json.loads(text), "Image": "x"}, shape).has_errors()
