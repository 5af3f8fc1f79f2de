"""The subscription to an engine's KV events: order, holes, replay, restarts; against the simulated publisher's sockets."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import msgspec
import pytest
import zmq
import zmq.asyncio

from rolloutd.engines.base import KvEventsAddress
from rolloutd.engines.kv_events import BATCH_BLOCKS, KvEvents, KvEventsUnreadable
from rolloutd.engines.kv_wire import AllCleared, BlocksRemoved, BlocksStored, KvEvent, Reset, decode, portions
from rolloutd.engines.sglang_info import KvEventsPublisher, kv_events_address
from rolloutd.engines.sim.kv_log import AllBlocksCleared, BlockRemoved, BlockStored
from rolloutd.engines.sim.kv_publisher import KvEventsConfig, KvPublisher, read_config

ANYWHERE = "tcp://127.0.0.1:*"


@contextmanager
def publishing(
    endpoint: str = ANYWHERE, replay_endpoint: str | None = ANYWHERE, buffer_steps: int = 10_000
) -> Iterator[KvPublisher]:
    publisher = KvPublisher(KvEventsConfig("zmq", endpoint, replay_endpoint, buffer_steps), 16)
    try:
        yield publisher
    finally:
        publisher.close()


class Heard:
    """What a subscription handed on, and a bell for it."""

    def __init__(self) -> None:
        self.events: list[KvEvent] = []
        self.connections: list[bool] = []
        self._news = asyncio.Condition()

    def batch(self, events: tuple[KvEvent, ...]) -> None:
        assert sum(len(getattr(event, "hashes", ())) for event in events) <= BATCH_BLOCKS
        self.events.extend(events)
        self._ring()

    def connection(self, connected: bool) -> None:
        self.connections.append(connected)
        self._ring()

    def _ring(self) -> None:
        async def ring() -> None:
            async with self._news:
                self._news.notify_all()

        asyncio.ensure_future(ring())

    async def until_removed(self, number: int) -> None:
        """Until block `number` was said to be removed."""
        async with self._news:
            await self._news.wait_for(lambda: BlocksRemoved((number,)) in self.events)

    async def until_connected(self, connected: bool = True) -> None:
        async with self._news:
            await self._news.wait_for(lambda: bool(self.connections) and self.connections[-1] is connected)

    async def until_reset(self, resets: int = 1) -> None:
        async with self._news:
            await self._news.wait_for(lambda: len(self.resets()) >= resets)

    def resets(self) -> list[str]:
        return [event.reason for event in self.events if isinstance(event, Reset)]

    def removed(self) -> list[int]:
        return [number for event in self.events if isinstance(event, BlocksRemoved) for number in event.hashes]


@asynccontextmanager
async def subscribed(publisher: KvPublisher, silence: float = 3.0) -> AsyncIterator[tuple[KvEvents, Heard]]:
    """A subscription that has caught up with what was published before."""
    address = KvEventsAddress(publisher.endpoint, publisher.replay_endpoint)
    heard = Heard()
    following = KvEvents(address, heard.batch, heard.connection, silence)
    task = asyncio.create_task(following.run())
    try:
        await heard.until_reset()
        yield following, heard
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def say(publisher: KvPublisher, *numbers: int) -> None:
    """One message per number."""
    for number in numbers:
        publisher.publish([BlockRemoved([number], "GPU")])


# ---- the stream


async def test_history_comes_first_then_what_is_published_in_order() -> None:
    with publishing() as publisher:
        say(publisher, 1, 2)
        async with subscribed(publisher) as (following, heard):
            await heard.until_removed(2)
            say(publisher, 3, 4)
            await heard.until_removed(4)
            assert heard.resets() == ["a new connection"] and isinstance(heard.events[0], Reset)
            assert heard.removed() == [1, 2, 3, 4]
            assert following.count.resets == 1 and following.count.replayed + following.count.messages == 4


async def test_a_hole_is_filled_from_the_replay_without_a_reset() -> None:
    with publishing() as publisher:
        async with subscribed(publisher) as (following, heard):
            say(publisher, 1)
            await heard.until_removed(1)
            publisher.to_drop = 3
            say(publisher, 2, 3, 4, 5)
            await heard.until_removed(5)
            say(publisher, 6)
            await heard.until_removed(6)
            assert heard.removed() == [1, 2, 3, 4, 5, 6]
            assert following.count.gaps == 1 and following.count.resets == 1


async def test_a_hole_that_is_not_kept_resets_and_starts_anew_with_what_is() -> None:
    with publishing(buffer_steps=2) as publisher:
        async with subscribed(publisher) as (following, heard):
            say(publisher, 1)
            await heard.until_removed(1)
            publisher.to_drop = 4
            say(publisher, 2, 3, 4, 5, 6)
            await heard.until_removed(6)
            assert heard.removed() == [1, 5, 6]
            assert len(heard.resets()) == 2 and "messages 1 to 4 are missing" in heard.resets()[1]
            assert heard.events.index(BlocksRemoved((5,))) > heard.events.index(Reset(heard.resets()[1]))


async def test_without_a_replay_endpoint_a_hole_is_a_reset() -> None:
    with publishing(replay_endpoint=None) as publisher:
        async with subscribed(publisher) as (_, heard):
            say(publisher, 1)
            await heard.until_removed(1)
            publisher.to_drop = 1
            say(publisher, 2, 3, 4)
            await heard.until_removed(4)
            assert heard.removed() == [1, 3, 4]
            assert heard.resets()[1:] == ["messages 1 to 1 are missing; the engine has no replay endpoint"]


async def test_a_replay_endpoint_that_never_answers_is_a_reset_not_a_wait_for_ever() -> None:
    context = zmq.asyncio.Context.instance()
    with context.socket(zmq.ROUTER) as deaf, publishing(replay_endpoint=None) as publisher:
        port = deaf.bind_to_random_port("tcp://127.0.0.1")
        publisher.replay_endpoint = f"tcp://127.0.0.1:{port}"
        async with subscribed(publisher, silence=0.05) as (_, heard):
            say(publisher, 1)
            await heard.until_removed(1)
            publisher.to_drop = 1
            say(publisher, 2, 3)
            await heard.until_removed(3)
            assert heard.removed() == [1, 3] and "does not give message" in heard.resets()[-1]


@pytest.mark.parametrize("earlier", [1, 3, 5])
async def test_a_restarted_publisher_is_a_reset_wherever_its_numbers_are(earlier: int) -> None:
    """It may be behind, level with or beyond where the old one was."""
    with publishing() as first:
        endpoint, replay = first.endpoint, first.replay_endpoint
        async with subscribed(first) as (_, heard):
            say(first, 1, 2, 3)
            await heard.until_removed(3)
            first.close()
            await heard.until_connected(False)
            second = await rebound(endpoint, replay)
            try:
                say(second, *range(11, 11 + earlier))
                await heard.until_reset(2)
                await heard.until_removed(10 + earlier)
                say(second, 20)
                await heard.until_removed(20)
            finally:
                second.close()
            assert heard.removed() == [1, 2, 3, *range(11, 11 + earlier), 20]
            assert len(heard.resets()) == 2


async def rebound(endpoint: str, replay_endpoint: str | None) -> KvPublisher:
    """The next process on the same ports, as soon as libzmq has let go of them."""
    while True:
        try:
            return KvPublisher(KvEventsConfig("zmq", endpoint, replay_endpoint), 16)
        except OSError:
            await asyncio.sleep(0.005)


async def test_a_broken_connection_to_the_same_publisher_is_no_reset() -> None:
    with publishing() as publisher:
        port = publisher.endpoint.rsplit(":", 1)[1]
        cables: set[asyncio.StreamWriter] = set()

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(4096):
                writer.write(data)

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", int(port))
            cables.update((writer, far_writer))
            await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer), return_exceptions=True)

        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        heard = Heard()
        through = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        following = KvEvents(KvEventsAddress(through, publisher.replay_endpoint), heard.batch, heard.connection)
        task = asyncio.create_task(following.run())
        try:
            await heard.until_reset()
            say(publisher, 1)
            await heard.until_removed(1)
            for cable in cables:
                cable.transport.abort()
            await heard.until_connected(False)
            say(publisher, 2)
            await heard.until_connected()
            await heard.until_removed(2)
            assert heard.removed() == [1, 2] and following.count.resets == 1
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            server.close()
            for cable in cables:
                cable.transport.abort()


async def test_an_endpoint_that_is_not_there_yet_is_waited_for() -> None:
    with publishing() as publisher:
        endpoint, replay = publisher.endpoint, publisher.replay_endpoint
    heard = Heard()
    task = asyncio.create_task(KvEvents(KvEventsAddress(endpoint, replay), heard.batch, heard.connection).run())
    publisher = await rebound(endpoint, replay)
    try:
        say(publisher, 1)
        await heard.until_removed(1)
    finally:
        publisher.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_long_history_survives_the_publishers_small_pipe() -> None:
    with publishing() as publisher:
        say(publisher, *range(6_000))
        async with subscribed(publisher, silence=0.5) as (following, heard):
            await heard.until_removed(5_999)
            assert heard.removed() == list(range(6_000)) and following.count.resets == 1


async def test_what_cannot_be_read_ends_the_subscription_with_words() -> None:
    with publishing() as publisher:
        address = KvEventsAddress(publisher.endpoint, publisher.replay_endpoint)
        publisher.publish([{"type": "BlockMoved"}])  # type: ignore[list-item]
        with pytest.raises(KvEventsUnreadable, match="BlockMoved"):
            await KvEvents(address, Heard().batch).run()
    with pytest.raises(KvEventsUnreadable, match="nowhere"):
        await KvEvents(KvEventsAddress("nowhere:1"), Heard().batch).run()


async def test_a_subscription_can_follow_another_at_once() -> None:
    # A name of a monitor stays taken for a moment after its socket was closed.
    following = KvEvents(KvEventsAddress("nowhere:1"), Heard().batch)
    for _ in range(50):
        with pytest.raises(KvEventsUnreadable, match="nowhere"):
            await following.run()


# ---- the wire


def test_events_are_read_as_sglang_writes_them() -> None:
    stored = BlockStored([5, -6], 4, list(range(32)), 16, None, "GPU", "v3")
    host = BlockRemoved([5], "CPU_PINNED")
    disk = BlockRemoved([5], "DISK")
    timestamp, events = decode(msgspec.msgpack.encode([1.5, [AllBlocksCleared(), stored, host, disk], 0]))
    tokens = array("I", range(32)).tobytes()
    assert timestamp == 1.5
    assert events == [AllCleared(), BlocksStored((5, -6), 4, tokens, 16, "v3"), BlocksRemoved((5,), on_host=True)]


def test_what_a_flush_in_the_same_message_undid_is_not_told() -> None:
    before, after = BlockRemoved([1]), BlockRemoved([2])
    sent = [AllBlocksCleared(), before, AllBlocksCleared(), after]
    assert decode(msgspec.msgpack.encode([1.5, sent, 0]))[1] == [AllCleared(), BlocksRemoved((2,))]


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (BlockStored([1], None, [1, 2, 3], 16, None), "3 token_ids do not fill 1 blocks of 16"),
        (BlockStored([1 << 63], None, [1] * 16, 16, None), "block_hashes"),
        (BlockStored([1], None, [-1] * 16, 16, None), "token_ids"),
        (BlockStored([1], None, [(1, 2)] * 16, 16, None), "token_ids"),  # type: ignore[list-item]
        (7, "Expected `object`"),
    ],
)
def test_events_that_make_no_sense_say_which_field(event: BlockStored, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decode(msgspec.msgpack.encode([1.0, [event], 0]))


def test_portions_keep_order_chain_and_size() -> None:
    tokens = bytes(range(40))
    events = [
        BlocksStored((1, 2, 3, 4, 5), 9, tokens, 2, "s"),
        BlocksRemoved((6, 7)),
        AllCleared(),
        BlocksRemoved((8,)),
    ]
    assert list(portions(events, 2)) == [
        (BlocksStored((1, 2), 9, tokens[:16], 2, "s"),),
        (BlocksStored((3, 4), 2, tokens[16:32], 2, "s"),),
        (BlocksStored((5,), 4, tokens[32:], 2, "s"),),
        (BlocksRemoved((6, 7)),),
        (AllCleared(), BlocksRemoved((8,))),
    ]


@pytest.mark.parametrize(
    ("publisher", "host", "expected"),
    [
        (None, "h", None),
        (KvEventsPublisher("*", 5557, dp_size=2), "h", None),
        (KvEventsPublisher(), "h", None),
        (KvEventsPublisher("*", 5557), "10.0.0.1", KvEventsAddress("tcp://10.0.0.1:5557")),
        (KvEventsPublisher("[::]", 5557), "fd00::1", KvEventsAddress("tcp://[fd00::1]:5557")),
        (
            KvEventsPublisher("10.0.0.9", 5557, "kv", 1, 5558),
            "h",
            KvEventsAddress("tcp://10.0.0.9:5557", "tcp://10.0.0.9:5558", "kv"),
        ),
    ],
)
def test_where_to_subscribe(publisher: KvEventsPublisher | None, host: str, expected: KvEventsAddress | None) -> None:
    assert kv_events_address(publisher, host) == expected


@pytest.mark.parametrize("text", ['{"publisher": "kafka"}', "{", '{"publisher": "zmq", "buffer_steps": -1}'])
def test_the_simulated_engine_refuses_a_config_that_makes_no_sense(text: str) -> None:
    with pytest.raises(ValueError, match="kv_events_config"):
        read_config(text)
