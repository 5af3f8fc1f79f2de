"""`rolloutd submit`: rollouts from a JSONL file, results into another, resumable.

Invariants
- Every line of the input becomes exactly one line per sample of the output, a result or an error; a bad line stops nothing.
- Lines are written as results come and whole; what is already there without an error is not run again.
- A line without an id gets one made of the file's name and its number, the same on every start.

What this module does not know: the contract (the client does).
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rolloutd.client import Client, RolloutdError, RolloutResult, ServerUnavailable, connect


def submit(server: str, run_id: str, source: Path, target: Path, in_flight: int) -> int:
    """Returns 0 when every line has its result, 1 when some have errors or the server went away."""
    try:
        lines = source.read_text(encoding="utf-8").splitlines()
        done = _done(target)
        with target.open("a", encoding="utf-8") as out:
            return asyncio.run(_run(server, run_id, source.stem, lines, done, out, in_flight))
    except OSError as error:
        print(f"rolloutd: {error.filename}: {error.strerror or error}", file=sys.stderr)
        return 1


def _done(target: Path) -> set[str]:
    """Submissions whose results are in the output already; a torn last line counts as absent."""
    done: set[str] = set()
    if not target.exists():
        return done
    for text in target.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and line.get("error") is None and "submission" in line:
            done.add(line["submission"])
    return done


async def _run(
    server: str, run_id: str, stem: str, lines: list[str], done: set[str], out: TextIO, in_flight: int
) -> int:
    room = asyncio.Semaphore(in_flight)
    failed = 0
    columns = (
        TextColumn("rollouts"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    if out.tell() and not _ends_with_newline(out):
        out.write("\n")
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("rollouts", total=sum(bool(text.strip()) for text in lines))
        try:
            async with connect(server, run=run_id, consumer=f"submit-{stem}") as client:
                async with asyncio.TaskGroup() as group:

                    async def one(number: int, text: str) -> None:
                        nonlocal failed
                        try:
                            rows = await _line(client, stem, number, text, done)
                            failed += any(row["error"] is not None for row in rows)
                            out.writelines(json.dumps(row) + "\n" for row in rows)
                            out.flush()
                            progress.advance(bar)
                        finally:
                            room.release()

                    for number, text in enumerate(lines, start=1):
                        if text.strip():
                            await room.acquire()
                            group.create_task(one(number, text))
        except* ServerUnavailable as errors:
            print(f"rolloutd: {errors.exceptions[0]}; run the same command again to go on", file=sys.stderr)
            return 1
    if failed:
        print(f"rolloutd: {failed} lines failed; their errors are in the output", file=sys.stderr)
    return 1 if failed else 0


async def _line(client: Client, stem: str, number: int, text: str, done: set[str]) -> list[dict[str, Any]]:
    """Run one line; nothing to write for one that is done."""
    submission_id = f"{stem}-{number}"
    try:
        options = json.loads(text)
        if not isinstance(options, dict):
            raise ValueError(f"must be an object, got {type(options).__name__}")
        submission_id = options.setdefault("rollout_id", submission_id)
        if submission_id in done:
            return []
        if "prompt" not in options:
            raise ValueError("has no `prompt` (text or a list of token ids)")
        prompt = options.pop("prompt")
        results = await client.generate_group(prompt, **options)
    except ServerUnavailable:
        raise
    except (ValueError, TypeError, RolloutdError) as error:
        return [{"submission": submission_id, "line": number, "error": f"{type(error).__name__}: {error}"}]
    return [_row(result, submission_id, number) for result in results]


def _row(result: RolloutResult, submission_id: str, number: int) -> dict[str, Any]:
    return {
        "submission": submission_id,
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
        "queued_seconds": result.times.queued_seconds,
        "total_seconds": result.times.total_seconds,
    }


def _ends_with_newline(out: TextIO) -> bool:
    with open(out.name, "rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"
