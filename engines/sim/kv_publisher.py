"""Publishes the simulated engine's cache events over ZMQ, with SGLang 0.5.23's wire and its `--kv-events-config`.

Invariants
- Sequence numbers start at 0 with the publisher and have no holes; a message is kept for replay whether or not it was
  sent.
- A subscriber that does not keep up loses messages; nobody waits for it.

What this module does not know: the cache, HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any, Literal

import msgspec
import zmq
import zmq.asyncio

from rolloutd.engines.sim.kv_log import CacheEvent

_END = (-1).to_bytes(8, "big", signed=True)


class KvEventsConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The value of `--kv-events-config`; words and defaults are SGLang's. Port 0 takes a free one."""

    publisher: Literal["zmq", "null"] = "null"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    topic: str = ""


def read_config(text: str) -> KvEventsConfig | None:
    """None for no events; ValueError for what SGLang would not take."""
    if not text:
        return None
    try:
        config = msgspec.json.decode(text, type=KvEventsConfig)
    except msgspec.DecodeError as error:
        raise ValueError(f"kv_events_config: {error}") from error
    if config.buffer_steps < 0:
        raise ValueError(f"kv_events_config: buffer_steps {config.buffer_steps} must not be negative")
    return config if config.publisher == "zmq" else None


class KvPublisher:
    """Both sockets. Construct inside a running event loop; raises OSError where an endpoint cannot be bound."""

    def __init__(self, config: KvEventsConfig, block_tokens: int) -> None:
        self._config = config
        self._block_tokens = block_tokens
        self._topic = config.topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._next = 0
        self.to_drop = 0  # messages that are kept and not sent: a fault
        context = zmq.asyncio.Context.instance()
        self._pub = context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, config.hwm)
        self._router: zmq.asyncio.Socket | None = None
        self._replays: asyncio.Task[None] | None = None
        try:
            self.endpoint = _bind(self._pub, config.endpoint)
            self.replay_endpoint: str | None = None
            if config.replay_endpoint is not None:
                self._router = context.socket(zmq.ROUTER)
                self.replay_endpoint = _bind(self._router, config.replay_endpoint)
                self._replays = asyncio.create_task(self._serve_replays(self._router), name="kv event replays")
        except OSError:
            self.close()
            raise

    def describe(self) -> dict[str, Any]:
        """The `kv_events` of `/server_info`."""
        host, port = self.endpoint.removeprefix("tcp://").rsplit(":", 1)
        said: dict[str, Any] = {
            "publisher": "zmq",
            "endpoint_host": host,
            "endpoint_port_base": int(port),
            "topic": self._config.topic,
            "block_size": self._block_tokens,
            "dp_size": 1,
        }
        if self.replay_endpoint is not None:
            said["replay_endpoint_port_base"] = int(self.replay_endpoint.rsplit(":", 1)[1])
        return said

    def publish(self, events: list[CacheEvent]) -> None:
        """One message with these events, in order."""
        payload = self._encoder.encode([time.time(), events, 0])
        number, self._next = self._next, self._next + 1
        self._kept.append((number, payload))
        if self.to_drop:
            self.to_drop -= 1
            return
        # A PUB socket never waits: the future is done when it is returned.
        self._pub.send_multipart([self._topic, number.to_bytes(8, "big"), payload])

    async def _serve_replays(self, router: zmq.asyncio.Socket) -> None:
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 3:
                continue
            caller, _, start = frames
            for number, payload in list(self._kept):
                if number >= int.from_bytes(start, "big"):
                    await router.send_multipart([caller, b"", self._topic, number.to_bytes(8, "big"), payload])
            await router.send_multipart([caller, b"", b"", _END, b""])

    def close(self) -> None:
        """Hang up."""
        if self._replays is not None:
            self._replays.cancel()
        for socket in (self._pub, self._router):
            if socket is not None:
                socket.close(linger=0)


def _bind(socket: zmq.asyncio.Socket, endpoint: str) -> str:
    """Bind, and return the endpoint with its real port; a wildcard host stays one, as SGLang describes it."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"KV events at {endpoint}: {error}") from error
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    host = endpoint.removeprefix("tcp://").rsplit(":", 1)[0]
    port = bound.rstrip(b"\0").decode().rsplit(":", 1)[1]
    return f"tcp://{host}:{port}"
