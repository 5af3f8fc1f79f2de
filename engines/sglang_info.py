"""SGLang's own description of itself: `/server_info`, `/model_info` and `/v1/loads` as `EngineInfo` and `EngineLoad`.

Invariants
- A figure that the server does not state is an error that names it, never a guess.
- `incarnation` is made of what one process start fixes and no request changes. SGLang states no process id and no start
  time, but `/server_info` has `startup_time`, the durations of its start steps to the nanosecond, and `random_seed`,
  drawn at each start unless fixed by a flag. Together with the launch command they differ between any two starts and
  survive weight updates.
- Over several data-parallel ranks counts are sums and the clock is the oldest rank's.

What this module does not know: HTTP.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from rolloutd.engines.base import EngineInfo, EngineLoad, KvEventsAddress

# `max_req_input_len` = min(context, KV capacity) - 1 - 5 (SGLang 0.5.23, managers/tp_worker.py); a prompt of that
# length or longer is refused.
_INPUT_RESERVE_TOKENS = 6

_GIB = 1 << 30
_WILDCARD_HOSTS = ("*", "0.0.0.0", "::", "[::]")
_MICROSECONDS = 1e6


class InternalState(msgspec.Struct):
    """One scheduler's part of `/server_info`."""

    effective_max_running_requests_per_dp: int | None = None


class KvEventsPublisher(msgspec.Struct):
    """`/server_info.kv_events`: where rank r publishes is the base port + r."""

    endpoint_host: str = "*"
    endpoint_port_base: int = 0  # 0: not said
    topic: str = ""
    dp_size: int = 1
    replay_endpoint_port_base: int | None = None


class ServerInfo(msgspec.Struct):
    """The part of `/server_info` that the door reads; names are SGLang's."""

    version: str
    page_size: int
    max_req_input_len: int
    model_path: str
    served_model_name: str = ""
    context_length: int | None = None
    dp_size: int = 1
    incremental_streaming_output: bool = False
    stream_interval: int = 1
    disable_overlap_schedule: bool = True  # SGLang always says; what does not, overlaps nothing
    schedule_policy: str = "fcfs"
    disable_radix_cache: bool = False
    allow_auto_truncate: bool = False
    skip_tokenizer_init: bool = False
    max_queued_requests: int | None = None
    disaggregation_mode: str = "null"
    frontend: str = "python"
    launch_command: str | None = None
    random_seed: int | None = None
    startup_time: Any = None
    kv_events: KvEventsPublisher | None = None
    internal_states: list[InternalState] = []


class ModelInfo(msgspec.Struct):
    """The part of `/model_info` that the door reads."""

    served_model_name: str
    weight_version: str
    model_path: str = ""
    is_generation: bool = True
    preferred_sampling_params: Any = None


class MemoryLoad(msgspec.Struct):
    kv_cache_gb: float = 0.0


class RankLoad(msgspec.Struct):
    """One rank of `/v1/loads`."""

    timestamp: float
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    max_running_requests: int = 0
    gen_throughput: float = 0.0
    total_prefill_uncached_tokens: int = 0
    total_prefill_busy_us: int = 0
    memory: MemoryLoad | None = None


class Loads(msgspec.Struct):
    loads: list[RankLoad]


def incarnation(server: ServerInfo) -> str:
    """16 hex digits that name this process start."""
    facts = [server.version, server.launch_command, server.random_seed, server.startup_time]
    return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()[:16]


def kv_events_address(publisher: KvEventsPublisher | None, host: str) -> KvEventsAddress | None:
    """Where to subscribe. host: the engine's, for a publisher that listens everywhere.

    None where nothing is published or no port is said, and for several ranks: each has a cache of its own, and one door
    stands for them all.
    """
    if publisher is None or publisher.dp_size > 1 or not publisher.endpoint_port_base:
        return None
    named = host if publisher.endpoint_host in _WILDCARD_HOSTS else publisher.endpoint_host
    if ":" in named and not named.startswith("["):
        named = f"[{named}]"
    replay = publisher.replay_endpoint_port_base
    return KvEventsAddress(
        f"tcp://{named}:{publisher.endpoint_port_base}",
        f"tcp://{named}:{replay}" if replay is not None else None,
        publisher.topic,
    )


def _warnings(server: ServerInfo, model: ModelInfo) -> list[str]:
    said = []
    if not server.incremental_streaming_output:
        said.append(
            "cumulative streaming: every frame repeats the whole answer, so bytes grow with the square of its length; "
            "start the engine with --incremental-streaming-output"
        )
    if server.stream_interval <= 1:
        said.append(
            "a frame per token costs the engine and us much CPU; start the engine with --stream-interval 8 to 32"
        )
    if server.page_size == 1 and server.schedule_policy == "fcfs":
        said.append(
            "page size 1 under the fcfs order: cache bookkeeping per token, and equal prompts that arrive together are "
            "each computed in full; start the engine with --page-size 16 or more"
        )
    if server.disable_radix_cache:
        said.append("the radix cache is off: no prefix is ever reused; drop --disable-radix-cache")
    if server.max_queued_requests is not None:
        said.append(
            f"--max-queued-requests {server.max_queued_requests}: requests that the engine itself puts back are "
            "refused and lose their tokens; leave it unset, the queue is kept here"
        )
    if server.allow_auto_truncate:
        said.append("--allow-auto-truncate: over-long requests are shortened without a word instead of being refused")
    if server.skip_tokenizer_init:
        said.append("--skip-tokenizer-init: text prompts and stop strings do not work on this engine")
    if server.dp_size > 1:
        said.append(
            f"--dp-size {server.dp_size}: each rank has its own cache behind one port and prefix placement cannot "
            "choose one; run one server per rank"
        )
    if server.kv_events is not None and server.page_size == 1:
        said.append("KV events with page size 1: an event per token; start the engine with --page-size 16 or more")
    if server.disaggregation_mode != "null":
        said.append(f"--disaggregation-mode {server.disaggregation_mode}: not supported, requests may never finish")
    if server.frontend != "python":
        said.append(f"frontend {server.frontend}: it has no routes for pausing and weight updates")
    if model.preferred_sampling_params:
        said.append("--preferred-sampling-params: sampling words that a rollout leaves out get the engine's values")
    if server.startup_time is None:
        said.append("the server states no startup_time: a restart between two registrations cannot be told")
    return said


def engine_info(server: ServerInfo, model: ModelInfo, loads: Loads, vocabulary_size: int, host: str = "") -> EngineInfo:
    """One description; ValueError, naming the field, where the server does not say what is needed.

    host: where the server is reached, for addresses that it does not know of itself.
    """
    if not model.is_generation:
        raise ValueError("is_generation: the model does not generate (an embedding or reward head)")
    if not loads.loads:
        raise ValueError("/v1/loads: no rank reports")
    slots = sum(state.effective_max_running_requests_per_dp or 0 for state in server.internal_states)
    slots = slots or sum(rank.max_running_requests for rank in loads.loads)
    if slots <= 0:
        raise ValueError("max_running_requests: stated neither by /server_info nor by /v1/loads")
    context = server.max_req_input_len + _INPUT_RESERVE_TOKENS
    return EngineInfo(
        incarnation=incarnation(server),
        # Loading weights from a path renames the model in /model_info; /server_info keeps the name it was started with.
        model=server.served_model_name or model.served_model_name,
        server_version=server.version,
        page_size_tokens=server.page_size,
        kv_capacity_tokens=sum(rank.max_total_num_tokens for rank in loads.loads),
        max_running_rollouts=slots,
        context_tokens=min(context, server.context_length or context),
        max_prompt_tokens=server.max_req_input_len - 1,
        vocabulary_size=vocabulary_size,
        weight_version=model.weight_version,
        incremental_streaming=server.incremental_streaming_output,
        kv_cache_bytes=round(sum(rank.memory.kv_cache_gb for rank in loads.loads if rank.memory is not None) * _GIB),
        kv_events=kv_events_address(server.kv_events, host),
        warnings=tuple(_warnings(server, model)),
    )


def engine_load(loads: Loads) -> EngineLoad:
    """One report over all ranks; ValueError when there is none."""
    ranks = loads.loads
    if not ranks:
        raise ValueError("/v1/loads: no rank reports")
    return EngineLoad(
        engine_time_seconds=min(rank.timestamp for rank in ranks),
        running_rollouts=sum(rank.num_running_reqs for rank in ranks),
        waiting_rollouts=sum(rank.num_waiting_reqs for rank in ranks),
        kv_used_tokens=sum(rank.num_used_tokens for rank in ranks),
        kv_capacity_tokens=sum(rank.max_total_num_tokens for rank in ranks),
        generated_tokens_per_second=sum(rank.gen_throughput for rank in ranks),
        prefilled_tokens_total=sum(rank.total_prefill_uncached_tokens for rank in ranks),
        prefill_busy_seconds_total=sum(rank.total_prefill_busy_us for rank in ranks) / _MICROSECONDS,
    )
