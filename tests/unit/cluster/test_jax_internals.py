"""JAX's private names: what they do not promise, and what happens where one is lacking."""

import threading

import jax
import jax._src.distributed
import jax._src.xla_bridge
import pytest
from tests.support import LIMIT

from unisono._errors import BackendError
from unisono.cluster._jax_internals import Board, let_gloo_listen_at


def test_without_a_client_there_is_an_error():
    """As in this process, which has joined no cluster."""
    with pytest.raises(BackendError, match=r"key_value_set and blocking_key_value_get .* Install jax=="):
        Board()


class Client:
    """A client of JAX whose service answers when it is let, or with an error."""

    def __init__(self, error=None):
        self.answers, self.texts, self._error = threading.Event(), {}, error

    def key_value_set(self, key, text):
        self.texts[key] = text
        assert self.answers.wait(LIMIT)
        if self._error:
            raise self._error

    def blocking_key_value_get(self, key, milliseconds):
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: none")


def test_a_text_is_posted_without_an_answer_and_an_error_is_raised(monkeypatch):
    """The answer is lost when process 0 ends: JAX itself would wait for ever."""
    for client in (Client(), Client(ValueError("posted before"))):
        monkeypatch.setattr(jax._src.distributed.global_state, "client", client)
        Board().post("k", "text", 0.01)
        assert Board().read("k", 0.01) is None
        client.answers.set()
    with pytest.raises(ValueError, match="posted before"):
        Board().post("k", "text", LIMIT)
    assert client.texts == {"k": "text"}


def test_without_the_name_gloo_chooses_and_a_warning_says_what_to_do(monkeypatch, caplog):
    monkeypatch.delattr(jax._src.xla_bridge, "make_cpu_client")
    assert not let_gloo_listen_at("10.0.0.2")
    assert "Map that name to 10.0.0.2 in /etc/hosts" in caplog.text


def test_the_installed_version_has_all_names(monkeypatch):
    registered = {}
    monkeypatch.setattr(
        "unisono.cluster._jax_internals.register_backend_factory",
        lambda name, factory, **options: registered.update({name: options}),
    )
    assert let_gloo_listen_at("127.0.0.1")
    assert registered == {"cpu": {"priority": 0, "fail_quietly": False}}
