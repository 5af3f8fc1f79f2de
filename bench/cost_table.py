"""`make cost-table`: the README's table of costs, from the last lines that the benchmarks left in `FOLDER`.

Invariants
- A figure in the table is one that a benchmark printed, rounded to three digits; nothing else is written.
- A benchmark that has not been run leaves its rows out, and its name is printed; the text around the markers stays.

What this module does not know: how anything is measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path("runs/bench")  # where `make bench-...` writes what it prints
BENCHMARKS = ("core", "index", "overhead", "leaks")
BEGIN, END = "<!-- cost-table -->", "<!-- end of cost-table -->"
_SHAPES = ("A", "B")

Figures = Mapping[str, Any]


def last_line(text: str) -> Figures | None:
    """The JSON object in the last line that is not empty; None when it is none."""
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        value = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def rows(figures: Mapping[str, Figures]) -> Iterator[tuple[str, str, str]]:
    """What, ours, and what to compare it with."""
    if overhead := figures.get("overhead"):
        ours, router = overhead["cpu_s_per_1000"], overhead["router_cpu_s_per_1000"]
        for tokens in sorted(ours, key=int):
            yield (
                f"CPU seconds per 1,000 rollouts, {int(tokens):,} prompt tokens, 64 in flight",
                _number(ours[tokens]),
                f"sglang-router {_number(router[tokens])}",
            )
        yield "rollouts per second at 2,048 tokens", f"{_number(overhead['throughput_ratio'])} x the router's", ""
        for percentile in (50, 99):
            yield (
                f"added latency p{percentile}, 500 single submissions a second, 4,096 tokens",
                f"{_number(overhead[f'added_p{percentile}_ms'])} ms",
                f"sglang-router {_number(overhead[f'router_added_p{percentile}_ms'])} ms",
            )
    if core := figures.get("core"):
        for free in ("1", "16"):
            if f"us_per_dispatch_{free}" in core:
                slots = "one slot frees" if free == "1" else f"{free} slots free"
                yield (
                    f"core, per dispatch, 100,000 queued on 64 engines, {slots} at a time",
                    f"{_number(core[f'us_per_dispatch_{free}'])} us",
                    core.get("core", ""),
                )
        if "handle_p99_ms" in core:
            worst = f"{_number(core['handle_p99_ms'])} / {_number(core['handle_max_ms'])} ms"
            yield "core, one event, p99 / longest", worst, ""
        if "hit_share_of_exact" in core:
            yield "core, prefix hits", f"{_number(100 * core['hit_share_of_exact'])} %", "of an exact scan's"
    if index := figures.get("index"):
        for key, text, unit in (
            ("match_us_p50", "match of 4,096 tokens, p50", " us"),
            ("insert_us_p50", "insert, p50", " us"),
            ("bytes_per_page", "memory per page of 16 tokens", " bytes"),
        ):
            values = [_number(index[key][shape]) for shape in _SHAPES if shape in index.get(key, {})]
            if values:
                yield f"prefix index at a million pages, {text}", " / ".join(values) + unit, "two tree shapes"
    leaks = figures.get("leaks")
    if leaks and leaks.get("bytes_per_cancel") is not None:
        yield "memory kept per cancelled rollout", f"{_number(leaks['bytes_per_cancel'])} bytes", ""


def table(figures: Mapping[str, Figures]) -> str:
    """Markdown. Empty rows make an empty table."""
    lines = ["| | rolloutd | |", "|---|---|---|"]
    lines += [f"| {what} | {ours} | {others} |" for what, ours, others in rows(figures)]
    return "\n".join(lines)


def replace(text: str, grid: str) -> str:
    """The text with the part between the markers replaced. ValueError when the markers are not there, once each."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the markers {BEGIN} and {END} must stand once each, in this order")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{grid}\n\n{END}{rest.partition(END)[2]}"


def _number(value: float) -> str:
    return f"{float(value):.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def main() -> int:
    readme = Path("README.md")
    figures: dict[str, Figures] = {}
    for name in BENCHMARKS:
        output = FOLDER / f"{name}.txt"
        found = last_line(output.read_text(encoding="utf-8")) if output.exists() else None
        if found is None:
            print(f"left out: {name}; `make bench-{name}` has not run to its end here", file=sys.stderr)
        else:
            figures[name] = found
    if not figures:
        print("no benchmark has been run here: README.md is as it was", file=sys.stderr)
        return 1
    readme.write_text(replace(readme.read_text(encoding="utf-8"), table(figures)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
