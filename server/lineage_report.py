"""`rolloutd lineage`: what a lineage file says, in a few lines.

What this module does not know: how the file is written; it reads LineageRecords as protobuf JSON.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from rolloutd.server.config_keys import ConfigError


class _Sums:
    """Counts over rollouts and groups."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.versions: Counter[int] = Counter()  # rollouts by how many policy versions wrote their tokens
        self.staleness: Counter[int] = Counter()  # rollouts with tokens, by the age of their oldest in versions
        self.groups: Counter[str] = Counter()
        self.failed_members = 0
        self.complete = self.stale = self.with_tokens = self.tokens = 0

    def add_rollout(self, record: dict[str, Any]) -> None:
        self.outcomes[_word(record.get("outcome"), "OUTCOME_")] += 1
        self.complete += bool(record.get("complete"))
        self.stale += bool(record.get("stale"))
        spans = record.get("spans", [])
        self.tokens += sum(span["end"] - span.get("start", 0) for span in spans)
        if spans:
            self.with_tokens += 1
            self.versions[len({int(span.get("policy_version", 0)) for span in spans})] += 1
            self.staleness[int(record.get("staleness_versions", 0))] += 1

    def add_group(self, record: dict[str, Any]) -> None:
        self.groups[_word(record.get("state"), "GROUP_STATE_")] += 1
        self.failed_members += len(record.get("failed_rollout_ids", []))


def report(files: Sequence[Path], out: TextIO) -> int:
    """Print the sums over all files; 0. Raises ConfigError for a file that is no lineage file, naming the line."""
    sums = _Sums()
    for path in files:
        for where, record in _records(path):
            try:
                if "rollout" in record:
                    sums.add_rollout(record["rollout"])
                elif "group" in record:
                    sums.add_group(record["group"])
                else:
                    raise ValueError("has neither `rollout` nor `group`")
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"{where}: is no lineage record: {error}") from error
    for name, value in _rows(sums):
        print(f"{name:<22}{value:>10}", file=out)
    return 0


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                yield f"{path}:{number}", json.loads(line)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a file of JSON lines: {error}") from error


def _rows(sums: _Sums) -> Iterator[tuple[str, int]]:
    yield "rollouts", sums.outcomes.total()
    for outcome, count in sums.outcomes.most_common():
        yield f"  {outcome}", count
    yield "complete", sums.complete
    yield "stale", sums.stale
    yield "generated tokens", sums.tokens
    yield "with tokens", sums.with_tokens
    for versions, count in sorted(sums.versions.items()):
        yield f"  of {versions} version{'s' if versions > 1 else ''}", count
    for age, count in sorted(sums.staleness.items()):
        yield f"  oldest {age} behind", count
    yield "groups", sums.groups.total()
    for state, count in sums.groups.most_common():
        yield f"  {state}", count
    yield "failed members", sums.failed_members


def _word(value: Any, prefix: str) -> str:
    return str(value or "unspecified").removeprefix(prefix).lower()
