"""One SubmitRollout stream: a consumer's requests in, its events out.

Invariants
- The first message carries hello, no other does. The newest stream of a consumer owns its events; an older one ends
  with ABORTED (REPLACED).
- Half-closing drains: the stream ends with OK when the core says that everything was delivered. However it ends, the
  consumer is detached exactly once, and only if no newer stream took over.
- One writer sends everything pending, in order, in messages bounded by events and bytes; under load it lets a little
  gather. Reading pauses while the
  client does not take its answers, and while the queue of a class it uses is nearly full.
- Reads and writes are never cancelled in flight (gRPC leaks the buffers of cancelled ones, grpc#43360); they end with
  the RPC.

What this module does not know: what becomes of a rollout.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import grpc

from rolloutd.scheduler import events
from rolloutd.scheduler.actions import Finished
from rolloutd.scheduler.refusal import Refusal
from rolloutd.scheduler.spec import RolloutSpec
from rolloutd.scheduler.states import Code, RolloutClass
from rolloutd.server.errors import SHUTTING_DOWN, FieldErrors, abort, field_error, not_found
from rolloutd.server.outbox import MAX_EVENTS_PER_MESSAGE, ItemRefused, Outbox
from rolloutd.server.rollout_changes import apply_update, find_rollouts
from rolloutd.server.state import MAX_ITEMS_PER_MESSAGE, ServerState
from rolloutd.server.translate_event import to_event
from rolloutd.server.translate_request import Checker, to_acknowledgement, to_spec
from rolloutd.v1 import (
    ITEM_KIND_ACKNOWLEDGEMENT,
    ITEM_KIND_CANCELLATION,
    ITEM_KIND_SUBMISSION,
    ITEM_KIND_UPDATE,
    Event,
    Hello,
    SubmitRolloutRequest,
    SubmitRolloutResponse,
)

StreamContext = grpc.aio.ServicerContext[SubmitRolloutRequest, SubmitRolloutResponse]

# A message is closed at this size, well below any sensible max_message_bytes.
_MESSAGE_BYTES = 4 << 20
# Rollouts handed to the core in one event: at about 30 us each, so that nobody waits for the loop for more than 2 ms.
_ROLLOUTS_PER_EVENT = 64
# Under load (several results in the last message) messages are this far apart, and acceptances, progress and news wait
# this long for a result to travel with: a message costs as much as ten results. A lone result never waits.
_GATHER_SECONDS = 0.002
# Reading pauses when this share of a class queue is taken, for at most this long per message: acknowledgements behind a
# full queue may be what frees it.
_QUEUE_PAUSE_SHARE = 0.9
_QUEUE_PAUSE_SECONDS = 1.0

# A look at the queues costs as much as half a rollout. There is none while less than this share of a class queue was submitted here
# since the last one, for at most so long: what others submit meanwhile has the rest of the queue.
_QUEUE_UNSEEN_SHARE = 0.01
_QUEUE_UNSEEN_SECONDS = 0.01

# Cursors grow by one per event: one above this was never given out, and would leave no room for those to come.
_MAX_CURSOR = (1 << 63) - 1

_REPLACED = Refusal(
    Code.ABORTED, "REPLACED", "a newer stream of the same consumer took over; do not reconnect from here with this name"
)


class RolloutStream:
    """One RPC. `serve()` is its whole life."""

    def __init__(self, state: ServerState, context: StreamContext) -> None:
        self._state = state
        self._loop = state.loop
        self._context = context
        self._classes: set[RolloutClass] = set()
        self._run_id = ""
        self._consumer_id = ""
        self._epoch = 0
        self._policy_version = 0
        self._unseen_rollouts = 0  # submitted here since the last look at the queues
        self._looked_at = -math.inf
        self._outbox: Outbox

    async def serve(self) -> None:
        first: Any = await self._context.read()
        refusal = self._open(first)
        if refusal is not None:
            await abort(self._context, refusal)
        reader = asyncio.create_task(self._read(first), name=f"read {self._run_id}/{self._consumer_id}")
        writer = asyncio.create_task(self._write(), name=f"write {self._run_id}/{self._consumer_id}")
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            if reader.done() and not writer.done():
                reader.result()
                await asyncio.wait({writer})
            writer.result()
        finally:
            # Wakes both tasks; a read or write in flight ends with the RPC.
            self._outbox.finish(SHUTTING_DOWN, drop_queued=True)
            for task in (reader, writer):
                task.add_done_callback(_retrieve)
            if self._loop.close_outbox(self._outbox):
                self._loop.post(events.DetachConsumer(self._run_id, self._consumer_id))
        end = self._outbox.end
        if end is not None and end.error is not None:
            await abort(self._context, end.error)

    # -- opening -----------------------------------------------------------------------------------------------------

    def _open(self, first: Any) -> Refusal | None:
        if first is grpc.aio.EOF or not first.HasField("hello"):
            return field_error("hello", "is required in the first message: run_id and consumer_id").refusal()
        hello: Hello = first.hello
        check = Checker()
        check.name("hello.run_id", hello.run_id, required=True)
        check.name("hello.consumer_id", hello.consumer_id, required=True)
        if hello.consumer_id in hello.take_over_consumer_ids:
            check.wrong("hello.take_over_consumer_ids", "must not name the consumer itself")
        if hello.resume_cursor > _MAX_CURSOR:
            check.wrong("hello.resume_cursor", f"must be a cursor of this run, got {hello.resume_cursor}; 0 for none")
        if check.errors:
            return FieldErrors(check.errors).refusal()
        if self._state.draining:
            return SHUTTING_DOWN
        self._run_id, self._consumer_id, self._epoch = hello.run_id, hello.consumer_id, hello.trainer_epoch
        view = self._state.run_view(hello.run_id)
        ttl_seconds = view.settings.undelivered_ttl_seconds if view is not None else 0.0
        self._outbox = Outbox(
            hello.run_id,
            hello.consumer_id,
            ttl_seconds or self._state.config.scheduler.delivery.undelivered_ttl_seconds,
        )
        previous = self._loop.open_outbox(self._outbox)
        refusal = self._loop.refusal(
            events.AttachConsumer(
                run_id=hello.run_id,
                consumer_id=hello.consumer_id,
                epoch=hello.trainer_epoch,
                cursor=hello.resume_cursor,
                take_over=tuple(hello.take_over_consumer_ids),
            )
        )
        if refusal is not None:
            self._loop.close_outbox(self._outbox)
            if previous is not None:
                self._loop.open_outbox(previous)
            return refusal
        if previous is not None:
            previous.finish(_REPLACED, drop_queued=True)
        self._policy_version = self._state.policy_version(hello.run_id)
        return None

    # -- requests in -------------------------------------------------------------------------------------------------

    async def _read(self, first: SubmitRolloutRequest) -> None:
        """Apply messages until the client half-closes, then tell the core."""
        message: Any = first
        while True:
            await self._apply(message)
            await self._pause()
            if self._ended():
                return
            message = await self._context.read()
            if self._ended():
                return
            if message is grpc.aio.EOF:
                break
            if message.HasField("hello"):
                self._outbox.finish(field_error("hello", "belongs in the first message only").refusal())
                return
        # A client that vanished looks the same for a moment; its cancellation is on the way and detaches it.
        self._loop.post(events.CloseConsumer(self._run_id, self._consumer_id))

    def _ended(self) -> bool:
        return self._outbox.end is not None

    async def _apply(self, message: SubmitRolloutRequest) -> None:
        items = (
            len(message.submissions)
            + len(message.updates)
            + len(message.cancel_rollout_ids)
            + len(message.acknowledgements)
        )
        if items > MAX_ITEMS_PER_MESSAGE:
            problem = f"a message holds at most {MAX_ITEMS_PER_MESSAGE} items, this one has {items}; split it"
            self._outbox.finish(field_error("submissions", problem).refusal())
            return
        if message.submissions:
            await self._submit(message)
        for update in message.updates:
            refusal = apply_update(self._state, self._run_id, update, self._epoch)
            if refusal is not None:
                self._refuse(update.rollout_id, ITEM_KIND_UPDATE, refusal)
        if message.cancel_rollout_ids:
            self._cancel(message.cancel_rollout_ids)
        if message.acknowledgements or message.acknowledge_through_cursor:
            self._acknowledge(message)

    async def _submit(self, message: SubmitRolloutRequest) -> None:
        batch: list[RolloutSpec] = []
        rollouts = 0
        for submission in message.submissions:
            try:
                spec = to_spec(submission)
            except FieldErrors as error:
                self._refuse(submission.rollout_id, ITEM_KIND_SUBMISSION, error.refusal())
                continue
            if self._state.tokenizers.wants(spec):
                spec = await self._state.tokenizers.apply(spec)
            if spec.rollout_class is not None:
                self._classes.add(spec.rollout_class)
            if batch and rollouts + spec.samples > _ROLLOUTS_PER_EVENT:
                self._post_batch(batch)
                batch, rollouts = [], 0
                await asyncio.sleep(0)
                if self._outbox.end is not None:
                    return
            batch.append(spec)
            rollouts += spec.samples
            self._unseen_rollouts += spec.samples
        if batch:
            self._post_batch(batch)

    def _post_batch(self, batch: list[RolloutSpec]) -> None:
        refusal = self._loop.refusal(events.SubmitRollouts(self._run_id, self._consumer_id, tuple(batch), self._epoch))
        if refusal is not None:
            for spec in batch:
                self._refuse(spec.rollout_id, ITEM_KIND_SUBMISSION, refusal)

    def _cancel(self, rollout_ids: Sequence[str]) -> None:
        known: list[str] = []
        for rollout_id in rollout_ids:
            found = find_rollouts(self._state, self._run_id, rollout_id)
            known.extend(view.rollout_id for view in found)
            if not found:
                self._refuse(rollout_id, ITEM_KIND_CANCELLATION, not_found("rollout", rollout_id))
        if known:
            refusal = self._loop.refusal(
                events.CancelRollouts(self._run_id, rollout_ids=tuple(known), epoch=self._epoch)
            )
            if refusal is not None:
                for rollout_id in known:
                    self._refuse(rollout_id, ITEM_KIND_CANCELLATION, refusal)

    def _acknowledge(self, message: SubmitRolloutRequest) -> None:
        acknowledgements = []
        for item in message.acknowledgements:
            try:
                acknowledgements.append(to_acknowledgement(item))
            except FieldErrors as error:
                self._refuse(item.rollout_id, ITEM_KIND_ACKNOWLEDGEMENT, error.refusal())
        refusal = self._loop.refusal(
            events.AcknowledgeResults(
                self._run_id, self._consumer_id, tuple(acknowledgements), message.acknowledge_through_cursor
            )
        )
        if refusal is not None:
            for acknowledgement in acknowledgements:
                self._refuse(acknowledgement.rollout_id, ITEM_KIND_ACKNOWLEDGEMENT, refusal)

    def _refuse(self, rollout_id: str, kind: int, refusal: Refusal) -> None:
        if refusal.reason == "FENCED":  # nothing this stream says counts any more
            self._outbox.finish(refusal)
            return
        self._outbox.put(ItemRefused(rollout_id, kind, refusal), self._loop.clock())

    async def _pause(self) -> None:
        """Back-pressure: hold the next read while the client lags or the queues it uses are nearly full."""
        await self._outbox.wait_for_room()
        if not self._classes:
            return
        now = self._loop.clock()
        capacity = self._state.config.scheduler.queue.queue_capacity
        if self._unseen_rollouts <= capacity * _QUEUE_UNSEEN_SHARE and now - self._looked_at < _QUEUE_UNSEEN_SECONDS:
            return
        until = now + _QUEUE_PAUSE_SECONDS
        while (rest := until - self._loop.clock()) > 0 and self._outbox.end is None and self._queue_is_full():
            await self._loop.after_tick(rest)
        self._unseen_rollouts, self._looked_at = 0, self._loop.clock()

    def _queue_is_full(self) -> bool:
        view = self._state.run_view(self._run_id)
        if view is None:
            return False
        limit_bytes = self._state.config.scheduler.delivery.limit_bytes(view.settings)
        if view.undelivered_bytes >= limit_bytes * _QUEUE_PAUSE_SHARE:
            return False  # only reading on can free it: the acknowledgements are in there
        limit = self._state.config.scheduler.queue.queue_capacity * _QUEUE_PAUSE_SHARE
        return any(kind in view.classes and view.classes[kind].queued >= limit for kind in self._classes)

    # -- events out --------------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        """Send what is pending until the outbox has ended and is empty."""
        server = self._state.server_info()
        outbox = self._outbox
        results = 0  # in the message before
        sent_at = 0.0
        while True:
            await outbox.wait()
            if outbox.end is None and not outbox.is_urgent:
                await outbox.wait_urgent(_GATHER_SECONDS)
            if outbox.end is None and results > 1 and (rest := sent_at + _GATHER_SECONDS - self._loop.clock()) > 0:
                await asyncio.sleep(rest)
            if not len(outbox):
                return
            response = SubmitRolloutResponse()
            size_bytes = results = 0
            for entry in outbox.take(MAX_EVENTS_PER_MESSAGE):
                event = to_event(entry, server, self._policy_version, response.events.add())
                if not isinstance(entry, ItemRefused) and isinstance(entry.event, Finished):
                    results += 1
                    result = entry.event.result
                    size_bytes += result.size_bytes
                    if result.extras or result.size_bytes > _MESSAGE_BYTES:
                        self._fit(event)
                if size_bytes >= _MESSAGE_BYTES:
                    break
            sent_at = self._loop.clock()
            await self._context.write(response)

    def _fit(self, event: Event) -> None:
        """A result that no message can hold would break the stream on every try: leave its bulk out, and say so."""
        limit = self._state.config.max_message_bytes - 65_536
        if event.ByteSize() <= limit:
            return
        size_mib = event.ByteSize() / (1 << 20)
        bulk: tuple[Any, ...] = (
            "top_logprobs",
            "extras",
            "prompt_logprob_bytes",
            "logprob_bytes",
            "prompt_token_bytes",
        )
        for field in bulk:
            event.finished.ClearField(field)
        event.finished.complete = False
        event.finished.error.code = int(Code.RESOURCE_EXHAUSTED)
        event.finished.error.reason = "RESULT_TOO_LARGE"
        event.finished.error.message = (
            f"the result has {size_mib:.0f} MiB, a message at most {limit / (1 << 20):.0f}: log-probs and extras were "
            "left out; ask for fewer top_logprobs or raise server.max_message_bytes"
        )


def _retrieve(task: asyncio.Task[None]) -> None:
    """Take the exception of a task that outlives its RPC: the RPC's end is the reason for it."""
    if not task.cancelled():
        task.exception()
