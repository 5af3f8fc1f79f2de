"""A SGLang-shaped HTTP server that costs next to nothing: answers are encoded once and sent whole.

Invariants
- It speaks as much of SGLang's wire as registering, polling and generating need, for our door and for a router.
- A generation is answered at once (`hold_seconds` 0), or ends after a random time of that mean, sooner by
  `/abort_request` or when its connection is lost; `/v1/loads` counts those that have not ended.
- Answers hold `OUTPUT_TOKENS` tokens with log-probs, in one frame of a stream or in one plain body, as asked for.

What it does not know: prompts. They are neither parsed nor checked; how many tokens answers claim is set by
`GET /prompt_tokens/N`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
from typing import Any

OUTPUT_TOKENS = 64
SLOTS = 256
KV_TOKENS = 1 << 26
CONTEXT_TOKENS = 65_536
VOCABULARY_SIZE = 151_936
# `stream` is looked for at both ends of a body: prompts in the middle are the bulk, and not worth a search.
_HEAD_BYTES, _TAIL_BYTES = 512, 2048
_STREAM = (b'"stream":true', b'"stream": true')


# What our door asks at registration; answers hold one token then.
_PROBE = b'"max_new_tokens":1}'


def _answer(prompt_tokens: int, finish: dict[str, Any], tokens: int = OUTPUT_TOKENS) -> bytes:
    ids = [1000 + position for position in range(tokens)]
    meta = {
        "id": "0" * 32,
        "finish_reason": finish,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "cached_tokens": 0,
        "weight_version": "default",
        "weight_versions": [{"version": "default", "start": 0, "end": tokens}],
        "output_token_logprobs": [[-0.0123456 * (position + 1), token, None] for position, token in enumerate(ids)],
        "output_token_logprobs_length": tokens,
        "e2e_latency": 0.01,
    }
    if tokens == 1:
        meta["output_top_logprobs"] = [[[-0.5, ids[0], None]]]
    return json.dumps({"text": "", "output_ids": ids, "meta_info": meta}, separators=(",", ":")).encode()


def _plain(body: bytes, content_type: bytes = b"application/json", status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (status, content_type, len(body))
    return head + body


_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _events(answer: bytes) -> bytes:
    return _chunk(b"data: " + answer + b"\n\n") + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Engine:
    """What all connections of one process share."""

    def __init__(self, hold_seconds: float, seed: int) -> None:
        self.hold_seconds = hold_seconds
        self.random = random.Random(seed)
        self.running: dict[str, Connection] = {}
        self.generations = 0
        self.streamed = self.whole = self.aborted = self.probed = b""
        self.set_prompt_tokens(2048)
        self._seed = seed

    def set_prompt_tokens(self, count: int) -> None:
        answer = _answer(count, {"type": "length", "length": OUTPUT_TOKENS})
        self.whole = _plain(answer)
        self.streamed = _events(answer)
        self.probed = _events(_answer(1, {"type": "length", "length": 1}, tokens=1))
        self.aborted = _events(_answer(count, {"type": "abort", "message": "Aborted"}))

    def page(self, path: str) -> bytes:
        """The answer to a GET."""
        if path.startswith("/prompt_tokens/"):
            self.set_prompt_tokens(int(path.rpartition("/")[2]))
            return _plain(b"{}")
        name = path.partition("?")[0]
        if name in ("/health", "/ready", "/health_generate", "/ping"):
            return _plain(b"")
        value = self._values().get(name)
        return _plain(b'{"error":"not found"}', status=b"404 Not Found") if value is None else _plain(value)

    def _values(self) -> dict[str, bytes]:
        server: dict[str, Any] = {
            "version": "0.5.23", "page_size": 16, "max_req_input_len": CONTEXT_TOKENS - 6, "model_path": "mock",
            "served_model_name": "mock", "tokenizer_path": "mock", "context_length": CONTEXT_TOKENS, "dp_size": 1,
            "tp_size": 1, "incremental_streaming_output": True, "stream_interval": 64, "schedule_policy": "lpm",
            "random_seed": self._seed, "startup_time": {"total": 1.0}, "max_total_num_tokens": KV_TOKENS,
            "max_running_requests": SLOTS, "internal_states": [{"effective_max_running_requests_per_dp": SLOTS}],
        }  # fmt: skip
        model = {
            "model_path": "mock", "served_model_name": "mock", "tokenizer_path": "mock", "is_generation": True,
            "weight_version": "default", "model_type": "llama", "architectures": ["LlamaForCausalLM"],
        }  # fmt: skip
        load = {
            "timestamp": asyncio.get_running_loop().time(), "num_running_reqs": len(self.running),
            "num_waiting_reqs": 0, "num_used_tokens": 0, "max_total_num_tokens": KV_TOKENS, "gen_throughput": 1000.0,
            "total_prefill_uncached_tokens": 0, "total_prefill_busy_us": 0, "memory": {"kv_cache_gb": 16.0},
        }  # fmt: skip
        pages: dict[str, Any] = {
            "/server_info": server, "/get_server_info": server, "/model_info": model, "/get_model_info": model,
            "/v1/loads": {"timestamp": "now", "loads": [load]}, "/generations": {"total": self.generations},
            "/v1/models": {"object": "list", "data": [{"id": "mock", "object": "model"}]},
        }  # fmt: skip
        return {name: json.dumps(value).encode() for name, value in pages.items()}


class Connection(asyncio.Protocol):
    """One connection: one request at a time, as HTTP/1.1 clients without pipelining send them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._transport: asyncio.Transport
        self._head = b""
        self._request_line = b""
        self._left = -1  # bytes of the body still to come; -1: reading a head
        self._kept = b""  # of the body: its begin and its end, or all of it while generations are held
        self._begin = b""
        self._rid = ""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports are of a class of their own

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()

    def data_received(self, data: bytes) -> None:
        if self._left < 0:
            data = self._head + data if self._head else data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._head = data
                return
            head, data = data[:end].lower(), data[end + 4 :]
            self._head = b""
            self._request_line = head[: head.find(b"\r\n")]
            at = head.find(b"content-length:")
            if at < 0 and b"transfer-encoding" in head:
                raise NotImplementedError("bodies need a content-length")
            self._left = int(head[at + 15 :].partition(b"\r\n")[0]) if at >= 0 else 0
            self._begin = data[:_HEAD_BYTES]
            self._kept = b""
            if b"100-continue" in head:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._left -= len(data)
        kept = self._kept + data if self._kept else data
        self._kept = kept if self._engine.hold_seconds or len(kept) <= _TAIL_BYTES else kept[-_TAIL_BYTES:]
        if self._left <= 0:
            self._left = -1
            self._respond()

    def _respond(self) -> None:
        engine, line = self._engine, self._request_line
        if line.startswith(b"post /generate"):
            engine.generations += 1
            stream = any(word in part for part in (self._kept, self._begin) for word in _STREAM)
            if _PROBE in self._kept:
                self._transport.write(_STREAM_HEAD + engine.probed)
            elif engine.hold_seconds:
                self._hold()
            else:
                self._transport.write(_STREAM_HEAD + engine.streamed if stream else engine.whole)
        elif line.startswith(b"post /abort_request"):
            running = engine.running.get(json.loads(self._kept)["rid"])
            if running is not None:
                running.end(engine.aborted)
            self._transport.write(_plain(b""))
        else:
            self._transport.write(engine.page(line.split(b" ")[1].decode()))

    def _hold(self) -> None:
        engine = self._engine
        self._rid = json.loads(self._kept)["rid"]
        engine.running[self._rid] = self
        self._transport.write(_STREAM_HEAD)
        seconds = engine.random.expovariate(1 / engine.hold_seconds)
        self._timer = asyncio.get_running_loop().call_later(seconds, self.end, engine.streamed)

    def end(self, events: bytes) -> None:
        """End a held generation."""
        self._forget()
        self._transport.write(events)

    def _forget(self) -> None:
        self._engine.running.pop(self._rid, None)
        self._rid = ""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def _serve(port: int, hold_seconds: float) -> None:
    engine = Engine(hold_seconds, seed=port)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(engine), "127.0.0.1", port, backlog=4096)
    gc.freeze()
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description="an engine that answers at once")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--hold-seconds", type=float, default=0.0, help="mean length of a generation")
    options = parser.parse_args()
    import uvloop

    uvloop.run(_serve(options.port, options.hold_seconds))


if __name__ == "__main__":
    main()
