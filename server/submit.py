"""`rolloutd submit`: rollouts from a JSONL file, results into another, resumable.

Invariants
- Every line of the input becomes one line per sample in the output, or one with its error; a bad line stops nothing.
- Lines are written as results come, and acknowledged after that. Started again, it runs what is missing and what failed.
- A line without an id gets one made of the file's name and its number, the same on every start.

What this module does not know: the contract (the client does).
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rolloutd.client import Client, RolloutdError, RolloutResult, ServerUnavailable, connect


def submit(server: str, access: Mapping[str, Any], run_id: str, source: Path, target: Path, in_flight: int) -> int:
    """Returns 0 when every line has its result, 1 when some have errors or the server went away.

    `access`: the arguments of `connect` that say who we are.
    """
    try:
        lines = source.read_text(encoding="utf-8").splitlines()
        written = _Written(target)
        with target.open("a", encoding="utf-8") as out:
            return asyncio.run(_run(server, access, run_id, source.stem, lines, written, out, in_flight))
    except OSError as error:
        print(f"rolloutd: {error.filename}: {error.strerror or error}", file=sys.stderr)
        return 1


class _Written:
    """What the output holds already. A torn last line counts as absent."""

    def __init__(self, target: Path) -> None:
        self._last: dict[str, tuple[int, bool]] = {}  # submission -> (last attempt, whether a sample of it failed)
        self.ends_torn = False
        if not target.exists():
            return
        text = target.read_text(encoding="utf-8")
        self.ends_torn = bool(text) and not text.endswith("\n")
        for entry in text.splitlines():
            try:
                line = json.loads(entry)
            except ValueError:
                continue
            submission = line.get("submission") if isinstance(line, dict) else None
            if not isinstance(submission, str):
                continue
            attempt, failed = line.get("attempt", 0), line.get("error") is not None
            if attempt > self._last.get(submission, (-1, False))[0]:
                self._last[submission] = (attempt, failed)
            elif failed:
                self._last[submission] = (attempt, True)

    def has(self, submission: str) -> bool:
        return submission in self._last and not self._last[submission][1]

    def attempt(self, submission: str) -> int:
        """0, or one more than the last attempt that failed: the server does not run an id twice."""
        attempt, failed = self._last.get(submission, (0, False))
        return attempt + 1 if failed else attempt


class _Job:
    """One run over the input."""

    def __init__(self, client: Client, stem: str, written: _Written, out: TextIO) -> None:
        self._client = client
        self._stem = stem
        self._written = written
        self._out = out
        self._results: dict[str, asyncio.Future[RolloutResult]] = {}  # by rollout; also those of an earlier life
        self.failed = 0

    async def collect(self) -> None:
        """Take results as they come, until cancelled."""
        async for result in self._client.results():
            arrived = self._result(result.rollout_id)
            if not arrived.done():
                arrived.set_result(result)

    def _result(self, rollout_id: str) -> asyncio.Future[RolloutResult]:
        return self._results.setdefault(rollout_id, asyncio.get_running_loop().create_future())

    async def line(self, number: int, text: str) -> None:
        """Run one line and write what came of it."""
        submission = f"{self._stem}-{number}"
        attempt = 0
        try:
            options = json.loads(text)
            if not isinstance(options, dict):
                raise ValueError(f"must be an object, got {type(options).__name__}")
            submission = str(options.pop("rollout_id", submission))
            if self._written.has(submission):
                return
            attempt = self._written.attempt(submission)
            if "prompt" not in options:
                raise ValueError("has no `prompt` (text or a list of token ids)")
            prompt = options.pop("prompt")
            rollout_id = f"{submission}.{attempt}" if attempt else submission
            submitted = await self._client.submit(prompt, rollout_id=rollout_id, **options)
            await submitted.accepted()
        except ServerUnavailable:
            raise
        except (ValueError, TypeError, RolloutdError) as error:
            self.failed += 1
            row = {"submission": submission, "attempt": attempt, "line": number}
            self._write([row | {"error": f"{type(error).__name__}: {error}"}])
            return
        results = [await self._result(rollout_id) for rollout_id in submitted.rollout_ids]
        self.failed += any(not result.ok for result in results)
        self._write([_row(result, submission, attempt, number) for result in results])
        for result in results:  # only now: what was not written comes again
            self._client.acknowledge(result)
            del self._results[result.rollout_id]

    def _write(self, rows: list[dict[str, Any]]) -> None:
        self._out.writelines(json.dumps(row) + "\n" for row in rows)
        self._out.flush()


async def _run(
    server: str,
    access: Mapping[str, Any],
    run_id: str,
    stem: str,
    lines: list[str],
    written: _Written,
    out: TextIO,
    in_flight: int,
) -> int:
    room = asyncio.Semaphore(in_flight)
    if written.ends_torn:
        out.write("\n")
    columns = (TextColumn("rollouts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    gone: str | None = None
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("rollouts", total=sum(bool(text.strip()) for text in lines))

        async def one(job: _Job, number: int, text: str) -> None:
            try:
                await job.line(number, text)
                progress.advance(bar)
            finally:
                room.release()

        failed = 0
        try:
            consumer = f"submit-{stem}"
            async with connect(server, run=run_id, consumer=consumer, auto_acknowledge=False, **access) as client:
                job = _Job(client, stem, written, out)
                async with asyncio.TaskGroup() as group:
                    collector = group.create_task(job.collect())
                    async with asyncio.TaskGroup() as work:
                        for number, text in enumerate(lines, start=1):
                            if text.strip():
                                await room.acquire()
                                work.create_task(one(job, number, text))
                    collector.cancel()
                failed = job.failed
        except* RolloutdError as errors:
            gone = str(errors.exceptions[0])
    if gone is not None:
        print(f"rolloutd: {gone}; run the same command again to go on", file=sys.stderr)
        return 1
    if failed:
        print(f"rolloutd: {failed} lines failed; their errors are in the output, run again to retry", file=sys.stderr)
    return 1 if failed else 0


def _row(result: RolloutResult, submission: str, attempt: int, number: int) -> dict[str, Any]:
    return {
        "submission": submission,
        "attempt": attempt,
        "line": number,
        "rollout_id": result.rollout_id,
        "outcome": result.outcome,
        "error": None if result.ok else str(result.problem or result.outcome),
        "finish_reason": result.finish_reason,
        "complete": result.complete,
        "text": result.text,
        "tokens": result.tokens.tolist(),
        "logprobs": result.logprobs.tolist(),
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "engine_id": result.engine_id,
        "attempts": result.attempts,
        "policy_version": result.policy_version,
        "stale": result.stale,
        "spans": [[span.policy_version, span.start, span.end] for span in result.spans],
        "queued_seconds": result.times.queued_seconds,
        "total_seconds": result.times.total_seconds,
    }
