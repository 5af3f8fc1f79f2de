"""`rolloutd serve` in front of two real SGLang servers that get other weights: checkpoints, and the servers as they were before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rolloutd.client import Client, connect
from tests.e2e.engine_http import EngineHttp
from tests.e2e.engine_tap import EngineTap
from tests.e2e.processes import Rolloutd
from tests.e2e.redecode import Transformers
from tests.sglang_servers import SGLangServer, environment


def checkpoint(version: int) -> Path:
    """The two checkpoints in turn; engines start with the one of version 0."""
    return environment() / f"model-{version % 2}"


async def restore(engine: EngineHttp) -> None:
    """Give a server back the weights, the label and the model name that it was started with."""
    await load(engine, 0, "default")


async def load(engine: EngineHttp, version: int, label: str) -> None:
    """Load the checkpoint of a version past rolloutd."""
    await engine.post(
        "/update_weights_from_disk",
        {"model_path": str(checkpoint(version)), "weight_version": label, "flush_cache": True},
    )


@dataclass(frozen=True, slots=True)
class PublishRig:
    """A running server, a tap before each of its engines, and the engines themselves, asked past both."""

    server: Rolloutd
    taps: list[EngineTap]
    engines: list[EngineHttp]
    processes: list[SGLangServer]
    transformers: Transformers

    def client(self, consumer: str = "trainer", *, auto_acknowledge: bool = True) -> Client:
        return connect(self.server.target, run="run", consumer=consumer, auto_acknowledge=auto_acknowledge)

    async def engine_urls(self, client: Client) -> Mapping[str, str]:
        """URL of the SGLang server behind each engine id."""
        behind = {tap.url: tap.engine_url for tap in self.taps}
        return {engine.engine_id: behind[engine.url] for engine in await client.list_engines()}
