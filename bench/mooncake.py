"""Requests of a file in Mooncake's format: one JSON object per line with `timestamp` (ms), `input_length`, `output_length` (tokens)
and `hash_ids`, one id per block of 512 prompt tokens; equal ids mean equal blocks.

Invariants
- Two prompts share exactly the blocks that their leading ids share. The last block is as long as `input_length` says.
- Ids are never repeated inside a line as anything but the file says; a malformed line is an error that names it.

What this module does not know: engines. Outputs are at least 1 token, prompts are cut to fit the context, and a scheduler is told the
longest output of the file as the limit of each.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from rolloutd.bench.workload import (
    TOKEN_BYTES,
    Item,
    Limits,
    TaskType,
    WorkClass,
    Workload,
    random_tokens,
    stream,
    token_bytes,
)

BLOCK_TOKENS = 512
SEEDS = 2**31


class TraceError(ValueError):
    """A line that is not a request; the message names file and line."""


def read_mooncake(
    path: Path, seed: int, limits: Limits, *, most_requests: int, rate: float = 1.0, epoch: int = 0
) -> Workload:
    """The first `most_requests` of a file, `rate` times as fast, as REUSABLE rollouts.

    Raises TraceError for a malformed line, OSError for an unreadable file.
    """
    if not rate > 0.0:
        raise ValueError(f"rate is {rate}; it must be above 0")
    seeds = stream(seed, "mooncake", epoch)

    @cache
    def block(hash_id: int) -> bytes:
        return token_bytes(random_tokens(stream(seed, "mooncake-block", hash_id), BLOCK_TOKENS, limits))

    requests: list[tuple[int, float, int, int, bytes]] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if len(requests) >= most_requests:
                break
            if not line.strip():
                continue
            at, prompt_tokens, output_tokens, ids = _request(line, f"{path.name}, line {number}")
            output_tokens = max(1, min(output_tokens, limits.context_tokens // 2))
            prompt_tokens = max(1, min(prompt_tokens, limits.context_tokens - output_tokens))
            whole = b"".join(block(one) for one in ids[: -(-prompt_tokens // BLOCK_TOKENS)])
            requests.append(
                (number, at / 1000.0 / rate, prompt_tokens, output_tokens, whole[: prompt_tokens * TOKEN_BYTES])
            )
    if not requests:
        raise TraceError(f"{path.name}: no request in it")
    cap = max(output for _, _, _, output, _ in requests)
    return Workload.of(
        path.name,
        (
            Item(
                rollout_id=f"trace-e{epoch}-{number:06d}",
                work_class=WorkClass.REUSABLE,
                task_type=TaskType.GENERATION,
                prompt_bytes=prompt,
                output_tokens=output,
                max_new_tokens=min(cap, limits.context_tokens - prompt_tokens),
                sampling_seed=int(seeds.integers(0, SEEDS)),
                stratum="trace",
                arrival_seconds=arrival,
            )
            for number, arrival, prompt_tokens, output, prompt in requests
        ),
    )


def _request(line: str, where: str) -> tuple[float, int, int, list[int]]:
    try:
        fields = json.loads(line)
        at, prompt, output, ids = (fields[name] for name in ("timestamp", "input_length", "output_length", "hash_ids"))
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(
            f"{where}: needs a JSON object with timestamp, input_length, output_length and hash_ids ({error})"
        ) from None
    whole = all(isinstance(one, int) for one in (prompt, output)) and isinstance(ids, list)
    if not whole or not isinstance(at, int | float) or prompt < 1 or output < 0 or at < 0:
        raise TraceError(f"{where}: lengths must be whole and positive, the timestamp at least 0, hash_ids a list")
    if len(ids) < -(-prompt // BLOCK_TOKENS):
        raise TraceError(
            f"{where}: {len(ids)} hash_ids do not cover input_length {prompt} ({BLOCK_TOKENS} tokens each)"
        )
    return float(at), prompt, output, ids
