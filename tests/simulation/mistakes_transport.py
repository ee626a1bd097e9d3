"""Mistakes in the transport over ZeroMQ."""

from tests.simulation._planted import Mistake

_PACKAGE = "unisono.rpc._transport"
_LINK = f"{_PACKAGE}._client:_Link"
_EVENTS = f"{_PACKAGE}._channel_events:ChannelEvents"
_CHANNEL = f"{_PACKAGE}._local_channel:LocalChannel"
_CHANNELS = f"{_PACKAGE}._server_channels:ServerChannels"
_SERVER = f"{_PACKAGE}._server:RpcServer"
_SHARED = f"{_PACKAGE}._shared_memory"


def _mistake(name, place, old, new):
    return Mistake(name, place, old, new, "transport")


# Harmless, as the kernel forgets a number that is closed: a direct connection that is watched on. And as
# ZeroMQ itself gives an attempt up before: one that is not there in time is waited for.
MISTAKES = (
    _mistake(
        "answers that lie in a direct connection at its end are lost",
        f"{_LINK}._failed",
        "self._settle(self._channel.receive_rest())",
        "pass",
    ),
    _mistake(
        "a server closes before its last answers are sent",
        f"{_SERVER}._serve",
        "self._wait_for_answers()",
        "pass",
    ),
    _mistake(
        "a thread is signalled before its function waits",
        f"{_PACKAGE}._sockets:Mailbox.put",
        "self._functions.append(function)\n",
        "was, self._is_signalled = self._is_signalled, True\n    if not was:\n"
        "        with contextlib.suppress(OSError):\n            self._writer.send(b'x')\n"
        "    self._functions.append(function)\n",
    ),
    _mistake(
        "functions are looked for before the flag is reset",
        f"{_PACKAGE}._sockets:Mailbox.run",
        "self._is_signalled = False\n    while self._functions:",
        "while self._functions or (self._is_signalled and setattr(self, '_is_signalled', False)):",
    ),
    _mistake(
        "a thread that takes answers is not told of a failure",
        f"{_EVENTS}.take_until",
        "future.add_done_callback(self._ring)",
        "pass",
    ),
    _mistake(
        "the clients' thread takes nothing after another one has",
        f"{_EVENTS}.take_until",
        "self._gate.modify(self._channels, select.EPOLLIN)",
        "pass",
    ),
    _mistake(
        "a connection that has failed is watched on",
        f"{_LINK}._channel_ready",
        "self._thread.channels.unwatch(channel.descriptor)",
        "pass",
    ),
    _mistake(
        "a request for which there is no room is lost",
        f"{_LINK}._flush",
        "self._next_look = time.monotonic() + _FIRST_RETRY",
        "self._unsent.popleft()",
    ),
    _mistake(
        "a request for which there was no room is not tried again",
        f"{_LINK}._flush",
        "self._next_look = time.monotonic() + _FIRST_RETRY",
        "pass",
    ),
    _mistake(
        "one handshake that is broken off means another key",
        f"{_LINK}._break_handshake",
        "self._broken_handshakes < _BROKEN_HANDSHAKES",
        "self._broken_handshakes < 1",
    ),
    _mistake(
        "what waits is sent anew with half a message",
        f"{_CHANNEL}.flush",
        "self._backlog[0] = data[sent:], None",
        "self._backlog[0] = data, None",
    ),
    _mistake(
        "a message behind another one is dropped",
        f"{_CHANNEL}._received_messages",
        "if used == size:",
        "if used:",
    ),
    _mistake(
        "shared memory is written while it is read",
        f"{_SHARED}:OutgoingSegments.acquire",
        "segment.memory[0] = 1",
        "pass",
    ),
    _mistake(
        "shared memory is released with its message",
        f"{_SHARED}:IncomingSegments.borrow",
        "whole.release = _SegmentRelease(memory)",
        "_SegmentRelease(memory)",
    ),
    _mistake("answers without room wait for ever", f"{_SERVER}._serve", "if self._backlog:", "if False:"),
    _mistake(
        "a direct connection with room is not written to",
        f"{_CHANNELS}.send",
        "self._mailbox.put(lambda: self._watch(channel, zmq.POLLIN | zmq.POLLOUT))",
        "pass",
    ),
    _mistake(
        "room is waited for that is not needed",
        f"{_CHANNELS}.receive",
        "self._watch(channel, zmq.POLLIN)",
        "pass",
    ),
    _mistake(
        "connections that waited for a descriptor wait for ever",
        f"{_CHANNELS}.receive",
        "or self.is_paused:",
        "or False:",
    ),
    _mistake(
        "a nearer deadline does not wake the clients' thread",
        f"{_PACKAGE}._client_thread:ClientThread.wake_by",
        "if moment < self._wakes_at:",
        "if False:",
    ),
    _mistake(
        "a deadline that is set while links are asked is missed",
        f"{_PACKAGE}._client_thread:ClientThread._turn",
        "self._wakes_at = math.inf",
        "pass",
    ),
    _mistake("reports of a connection stay open", f"{_LINK}._hang_up", "self._monitor.close()", "pass"),
    _mistake(
        "a client that was refused does not try again",
        f"{_LINK}._failed",
        "self._next_look = time.monotonic() + self._retry",
        "pass",
    ),
)
