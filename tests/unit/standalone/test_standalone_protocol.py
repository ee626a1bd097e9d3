"""What a server accepts of a message, and who may send one."""

import pytest

from unisono import InvalidArgumentError
from unisono.rpc import _fields as fields
from unisono.standalone._protocol import (
    CLIENT,
    SERVER,
    ProcessShape,
    file_name,
    printable,
    read_standalone_keys,
    task_of,
)

SECRET = {"UNISONO_CLUSTER_KEY": "5e" * 32}


def test_a_server_lets_clients_connect_and_no_task():
    server, client = read_standalone_keys(SECRET, SERVER), read_standalone_keys(SECRET, CLIENT)
    assert server.tasks == (CLIENT,)
    assert server.client_secret(CLIENT) == client.client_secret(CLIENT)
    assert server.server_secret(SERVER) != server.client_secret(SERVER)
    assert read_standalone_keys({}, SERVER) is None


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../up", "a/../../b", "a\0b", "a\\b", "x" * 1001, "/".join("a" * 60), "."]
)
def test_files_stay_in_the_directory_of_the_job(name):
    with pytest.raises(InvalidArgumentError, match="below its directory"):
        file_name(name)


@pytest.mark.parametrize("text", ["worker", "worker:", "worker:x", "boss:0", "worker:-1", "ps:1234567", ""])
def test_what_is_no_task(text):
    with pytest.raises(InvalidArgumentError):
        task_of(text)


@pytest.mark.parametrize(
    ("read", "meta"),
    [
        (lambda m: fields.text(m, "x"), {"x": 3}),
        (lambda m: fields.text(m, "x"), {}),
        (lambda m: fields.text(m, "x", 2), {"x": "abc"}),
        (lambda m: fields.number(m, "x", 0, 5), {"x": True}),
        (lambda m: fields.number(m, "x", 0, 5), {"x": 6}),
        (lambda m: fields.whole(m, "x", most=5), {"x": 1.5}),
        (lambda m: fields.mapping(m, "x"), {"x": []}),
        (ProcessShape.parse, {"tasks": 0}),
        (ProcessShape.parse, {"tasks": 1, "devices": "2"}),
    ],
)
def test_fields_have_types_and_limits(read, meta):
    with pytest.raises(InvalidArgumentError):
        read(meta)


def test_a_spare_serves_a_process_that_has_the_machine_for_itself():
    assert ProcessShape().is_usual
    assert ProcessShape(devices=1).is_usual
    others = [ProcessShape(tasks=2), ProcessShape(devices=2), ProcessShape(ps=True)]
    assert not any(shape.is_usual for shape in others)


def test_a_client_cannot_write_on_terminals():
    assert printable("a\x1b[2J\n\u202eb") == "a?[2J??b"
    assert len(printable("x" * 10_000)) == 200
