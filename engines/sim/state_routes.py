"""Read-only routes of the simulated engine: info, load, health, metrics, and `/sim/state` for tests.

Invariants
- Field names are SGLang 0.5.23's. `timestamp` is wall time (epoch); `gen_throughput` and `total_prefill_busy_us` are per and in
  real seconds, as everything that a caller can time: else one that weighs prefill against decode is wrong by the time scale.
- Load is fresh at every read, while SGLang publishes every 15 decode steps; in a retract or in-place pause it is frozen,
  as there.

What this module does not know: how anything is computed.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from datetime import UTC, datetime

import orjson
from aiohttp import web

from rolloutd.engines.sim.driver import Driver
from rolloutd.engines.sim.faults import FaultBoard

VERSION = "0.5.23"  # the release whose wire this is
# KV bytes of an 8B model with grouped-query attention in bf16 (2 x 32 layers x 8 heads x 128 x 2 bytes).
KV_BYTES_PER_TOKEN = 131_072
WEIGHT_GB = 15.0
HEALTH_PROBE_SECONDS = 1.0
HEALTH_TIMEOUT_SECONDS = 20.0
_SECTIONS = frozenset(("core", "memory", "spec", "lora", "disagg", "queues", "all"))


def json_response(body: object, status: int = 200) -> web.Response:
    """JSON as SGLang writes it."""
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


class StateRoutes:
    """Handlers; `stopping` turns readiness off."""

    def __init__(
        self,
        driver: Driver,
        faults: FaultBoard,
        model_path: str,
        host: str,
        port: int,
        process_seed: int,
        startup_seconds: float,
    ) -> None:
        self._driver = driver
        self._faults = faults
        self._model_path = model_path
        self._host = host
        self.port = port
        self._process_seed = process_seed
        self._startup_seconds = startup_seconds
        self.stopping = False

    def routes(self) -> list[web.RouteDef]:
        """All routes of this class."""
        return [
            web.get("/model_info", self.model_info),
            web.get("/get_model_info", self.model_info),
            web.get("/server_info", self.server_info),
            web.get("/get_server_info", self.server_info),
            web.get("/v1/loads", self.loads),
            web.get("/health", self.health),
            web.get("/health_generate", self.health),
            web.get("/ready", self.ready),
            web.get("/ping", self.ping),
            web.get("/metrics", self.metrics),
            web.get("/sim/state", self.state),
        ]

    async def model_info(self, request: web.Request) -> web.Response:
        """Names and the weight version."""
        return json_response(
            {
                "model_path": self._driver.served_model_name or self._model_path,
                "served_model_name": self._driver.served_model_name or self._model_path,
                "tokenizer_path": self._model_path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self._driver.official_version,
                "load_format": "auto",
                "model_type": "simulated",
                "architectures": ["SimulatedForCausalLM"],
                "disaggregation_mode": "null",
            }
        )

    async def server_info(self, request: web.Request) -> web.Response:
        """Sizes and settings; `weight_version` and the model's names are launch values and never change, as in SGLang."""
        config, driver = self._driver.config, self._driver
        async with driver.inline():  # it asks the scheduler, which may be busy loading weights
            pass
        load, _ = driver.load()
        return json_response(
            {
                "model_path": self._model_path,
                "served_model_name": self._model_path,
                "tokenizer_path": self._model_path,
                "host": self._host,
                "port": self.port,
                "context_length": config.context_tokens,
                "page_size": config.page_size_tokens,
                "max_total_tokens": config.kv_tokens,
                "max_total_num_tokens": config.capacity_tokens,
                "max_req_input_len": config.max_prompt_tokens,
                "max_running_requests": config.slots,
                "max_queued_requests": config.max_queued,
                "max_prefill_tokens": config.max_prefill_tokens,
                "chunked_prefill_size": -1,
                "schedule_policy": config.schedule_policy,
                "stream_interval": config.stream_interval,
                "incremental_streaming_output": driver.incremental,
                "disable_radix_cache": False,
                "skip_tokenizer_init": False,
                "allow_auto_truncate": False,
                "disaggregation_mode": "null",
                "dp_size": 1,
                "tp_size": 1,
                "random_seed": self._process_seed,
                "weight_version": config.weight_version,
                "launch_command": shlex.join(sys.argv[1:]),
                "status": "stopping" if self.stopping else "ready",
                "startup_time": {"scheduler_e2e": self._startup_seconds},
                "kv_events": driver.publisher.describe() if driver.publisher is not None else None,
                "internal_states": [
                    {
                        "effective_max_running_requests_per_dp": config.slots,
                        "last_gen_throughput": load.generated_tokens_per_second,
                    }
                ],
                "version": VERSION,
                "frontend": "python",
            }
        )

    async def loads(self, request: web.Request) -> web.Response:
        """One rank's load."""
        include = set(request.query.get("include", "core").split(","))
        if not include <= _SECTIONS:
            return web.Response(text="Internal Server Error", status=500)  # SGLang does so
        load, wall = self._driver.load()
        rank: dict[str, object] = {
            "timestamp": wall,
            "dp_rank": 0,
            "num_running_reqs": load.running,
            "num_waiting_reqs": load.waiting,
            "num_waiting_uncached_tokens": load.queued_tokens,
            "num_used_tokens": load.used_tokens,
            "num_total_tokens": load.used_tokens + load.queued_total_tokens,
            "num_active_tokens": load.used_tokens,
            "num_prealloc_ready_tokens": 0,
            "max_total_num_tokens": load.capacity_tokens,
            "max_running_requests": self._driver.config.slots,
            "token_usage": round(load.used_tokens / load.capacity_tokens, 4),
            "gen_throughput": round(load.generated_tokens_per_second, 2),
            "cache_hit_rate": round(load.cache_hit_rate, 4),
            "utilization": 0.0,
            "total_prefill_uncached_tokens": load.prefilled_tokens_total,
            "total_prefill_busy_us": round(load.prefill_busy_seconds_total * 1e6),
        }
        every = "all" in include
        if every or "memory" in include:
            gigabytes = load.capacity_tokens * KV_BYTES_PER_TOKEN / (1 << 30)
            rank["memory"] = {
                "weight_gb": WEIGHT_GB,
                "kv_cache_gb": round(gigabytes, 3),
                "graph_gb": 0.0,
                "token_capacity": load.capacity_tokens,
            }
        if every or "queues" in include:
            rank["queues"] = {
                "waiting": load.waiting,
                "grammar": 0,
                "paused": 0,
                "retracted": load.retracted_waiting,
                "prealloc_ready": 0,
            }
        return json_response(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": VERSION,
                "accelerator": None,
                "num_accelerators": 1,
                "loads": [rank],
            }
        )

    async def health(self, request: web.Request) -> web.Response:
        """SGLang sends a one-token probe and looks once a second; in a pause the probe waits until the time-out."""
        if self.stopping:
            return web.Response(status=503)
        scale = self._driver.time_scale
        if not self._driver.paused:
            await asyncio.sleep(HEALTH_PROBE_SECONDS / scale)
            return web.Response(status=200)
        await asyncio.sleep(HEALTH_TIMEOUT_SECONDS / scale)
        return web.Response(status=503)

    async def ready(self, request: web.Request) -> web.Response:
        """Whether to send work here."""
        unready = self.stopping or self._driver.paused or self._faults.active("not_ready") is not None
        return web.Response(status=503 if unready else 200)

    async def ping(self, request: web.Request) -> web.Response:
        """Whether the process serves, paused or not."""
        return web.Response(status=503 if self.stopping else 200)

    async def metrics(self, request: web.Request) -> web.Response:
        """A small part of SGLang's Prometheus page."""
        load, _ = self._driver.load()
        rows = [
            ("gauge", "num_running_reqs", load.running),
            ("gauge", "num_queue_reqs", load.waiting),
            ("gauge", "num_used_tokens", load.used_tokens),
            ("gauge", "token_usage", load.used_tokens / load.capacity_tokens),
            ("gauge", "gen_throughput", load.generated_tokens_per_second),
            ("gauge", "max_total_num_tokens", load.capacity_tokens),
            ("counter", "prompt_tokens_total", load.prefilled_tokens_total + load.cached_tokens_total),
            ("counter", "generation_tokens_total", load.generated_tokens_total),
            ("counter", "cached_tokens_total", load.cached_tokens_total),
            ("counter", "num_requests_total", load.finished_total),
            ("counter", "num_aborted_requests_total", load.aborted_total),
            ("counter", "num_retracted_requests_total", load.retracted_total),
        ]
        text = "".join(f"# TYPE sglang:{name} {kind}\nsglang:{name} {value}\n" for kind, name, value in rows)
        return web.Response(text=text, content_type="text/plain")

    async def state(self, request: web.Request) -> web.Response:
        """What a test wants to know; also while faults are in force."""
        driver = self._driver
        load, _ = driver.load()
        running, queued = driver.machine.live_rids()
        return json_response(
            {
                "running_rids": running,
                "queued_rids": queued,
                "gated_rids": [rid for rid in driver.live if rid not in {*running, *queued}],
                "paused": driver.paused,
                "weight_version": driver.machine.weight_version,
                "in_control_call": driver.in_control_call,
                "released_memory": sorted(driver.released_memory),
                "vocab_size": driver.config.model.vocabulary_size,
                "kv_used_tokens": load.used_tokens,
                "kv_capacity_tokens": load.capacity_tokens,
                "finished": load.finished_total,
                "aborted": load.aborted_total,
                "retracted": load.retracted_total,
                "generated_tokens": load.generated_tokens_total,
                "prefilled_tokens": load.prefilled_tokens_total,
                "cached_tokens": load.cached_tokens_total,
                "simulated_seconds": driver.now(),
                "cpu_seconds": time.process_time(),
                "faults": self._faults.kinds(),
            }
        )
