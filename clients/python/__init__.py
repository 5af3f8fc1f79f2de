"""Python client of rolloutd: asyncio here, blocking in rolloutd.client.sync.

Example::

    async with rolloutd.client.connect("127.0.0.1:50051", run="grpo-7b", consumer="rank0") as client:
        group = await client.generate_group(prompt_ids, samples=8, max_new_tokens=1024, rollout_class="critical")
"""

from rolloutd.client.balanced import BalancedClient, connect_all
from rolloutd.client.client import Client, connect
from rolloutd.client.control import Quota
from rolloutd.client.errors import (
    ClientClosed,
    Fenced,
    Problem,
    PublishFailed,
    Refused,
    RolloutdError,
    RolloutFailed,
    ServerUnavailable,
    Unauthorized,
)
from rolloutd.client.handles import Results, Submission
from rolloutd.client.prompts import Prompt
from rolloutd.client.publishing import EngineUpdate, Publication, WeightPush
from rolloutd.client.results import Acceptance, Attempt, Notice, Progress, RolloutResult, Span, Times
from rolloutd.client.submissions import GenerateOptions, RolloutOptions

__all__ = [
    "Acceptance",
    "Attempt",
    "BalancedClient",
    "Client",
    "ClientClosed",
    "EngineUpdate",
    "Fenced",
    "GenerateOptions",
    "Notice",
    "Problem",
    "Progress",
    "Prompt",
    "Publication",
    "PublishFailed",
    "Quota",
    "Refused",
    "Results",
    "RolloutFailed",
    "RolloutOptions",
    "RolloutResult",
    "RolloutdError",
    "ServerUnavailable",
    "Span",
    "Submission",
    "Times",
    "Unauthorized",
    "WeightPush",
    "connect",
    "connect_all",
]
