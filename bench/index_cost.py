"""`make bench-index`: what the prefix index costs at a million pages, on the two shapes of `index_shapes.py`.

How the figures are taken
- `match_us`: 4,096 known tokens through `segments`, in distinct queries in random order, so neither the query nor its path is
  in a near cache. Versions are looked up newest first until one covers the query; the clock runs over all
  of them. `match_dict_us` is the same through `match`, `match_one_engine_us` with `hits_on` for one engine,
  `match_partial_us` where the query leaves the known path at a random page. `compare_us` compares a query with its pieces in
  a list and does nothing else: what this machine, as busy as it is, asks for the bytes alone.
- `insert_us`: 56 new pages behind a random page of a known path, at the memory bound, so that it evicts. `..._with_room` does
  not. `evict_us`: one least recent end. `..._by_fill`: with 10, 50 and 100 per cent of the shape in the index, the bound
  (where it binds) at what is in it.
- `bytes_per_page`: tracemalloc, of the index alone with its engine tables. `counted_bytes_per_page`: its own accounting.
- `sweep_slice_max_ms`: the longest of all sweeps of the core's size, through the pass after an eighth of the engines left and
  then through all nodes of an owner that left.
- The machine is shared: every measurement is repeated, and the round with the lowest median counts, median and p99 from the
  same round. The n-th sweep is the same work in each repeat, so its lowest time counts. Garbage is frozen, as in the server.

What this module does not know: the core. Each shape runs in a process of its own, one after the other.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
import tracemalloc
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from rolloutd.bench.index_shapes import ENGINES, PAGE_BYTES, Path, Shape, pages_of, shapes
from rolloutd.scheduler.clock import SWEEP_NODES
from rolloutd.scheduler.index import PrefixIndex

_T = TypeVar("_T")
Figures = dict[str, object]

ROUNDS = 7
QUERIES = 400  # 13 MB of queries and what they are compared with; more of them measure the memory
MATCH_ROUNDS = 4  # per round of the others: a match changes nothing, and takes a tenth of the time
OPERATIONS = 100  # per round; few, so that the rounds leave even a tenth of a shape mostly as it was
SWEEP_REPEATS = 3
FILL_PERCENT = (100, 50, 10)  # the whole shape first, into a heap without holes
BARS = {
    "match_us_p50": "A < 7, B < 10",
    "insert_us_p50_by_fill": "flat",
    "evict_us_p50_by_fill": "flat",
    "bytes_per_page": "A <= 100",
    "sweep_slice_max_ms": "< 1",
}


def timed(items: Iterable[_T], call: Callable[[_T], object]) -> list[float]:
    """Microseconds of each call."""
    clock = time.perf_counter_ns
    taken = []
    for item in items:
        start = clock()
        call(item)
        taken.append((clock() - start) / 1e3)
    return taken


def best(rounds: Iterable[list[float]]) -> list[float]:
    """The round with the lowest median."""
    return min(rounds, key=lambda taken: float(np.median(taken)))


def p50(taken: list[float]) -> float:
    return round(float(np.median(taken)), 2)


def p99(taken: list[float]) -> float:
    return round(float(np.percentile(taken, 99)), 2)


def look_up(index: PrefixIndex, path: Path) -> list[list[tuple[int, int]]]:
    """Segments per version looked up, newest first, up to the first version that covers the query."""
    looked_up = []
    tokens = path.tokens
    for namespace in path.namespaces:
        segments = index.segments(namespace, tokens)
        looked_up.append(segments)
        if segments and segments[0][1] * 4 == len(tokens):
            break
    return looked_up


def look_up_dict(index: PrefixIndex, path: Path) -> dict[str, int]:
    """The same as hits per engine, each engine's best."""
    best_hits: dict[str, int] = {}
    for namespace in path.namespaces:
        hits = index.match(namespace, path.tokens)
        if not best_hits:
            best_hits = hits
        else:
            for engine, hit in hits.items():
                if hit > best_hits.get(engine, 0):
                    best_hits[engine] = hit
        if hits and max(hits.values()) * 4 == len(path.tokens):
            break
    return best_hits


def look_up_one(index: PrefixIndex, path: Path, flag: int) -> int:
    """Tokens held by the engine with this flag."""
    return max(max(index.hits_on(segments, flag).values(), default=0) for segments in look_up(index, path))


def pieces_of(index: PrefixIndex, path: Path) -> list[bytes]:
    """The query cut where the engines that hold it change, in copies of their own."""
    ends = sorted(length * 4 for _, length in index.segments(path.home, path.tokens))
    return [path.tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def compare(pair: tuple[bytes, list[bytes]]) -> bool:
    tokens, pieces = pair
    start = 0
    for piece in pieces:
        if not tokens.startswith(piece, start):
            return False
        start += len(piece)
    return True


def measure_matches(shape: Shape, index: PrefixIndex, rounds: int) -> Figures:
    known = shape.queries(QUERIES, seed=1)
    rng = random.Random(2)
    source = np.random.default_rng(2)
    lookups = [len(look_up(index, path)) for path in known]
    cuts = [rng.randrange(1, len(path.tokens) // PAGE_BYTES) for path in known]
    parted = [
        path._replace(tokens=path.tokens[: cut * PAGE_BYTES] + pages_of(len(path.tokens) // PAGE_BYTES - cut, source))
        for path, cut in zip(known, cuts, strict=True)
    ]
    pairs = [(path.tokens, pieces_of(index, path)) for path in known]
    gc.collect()
    gc.freeze()
    one = 1 << (index.bit(known[0].engine) or 0)
    segments = best(timed(known, partial(look_up, index)) for _ in range(rounds))
    as_dict = best(timed(known, partial(look_up_dict, index)) for _ in range(rounds))
    for_one = best(timed(known, lambda path: look_up_one(index, path, one)) for _ in range(rounds))
    partly = best(timed(parted, partial(look_up, index)) for _ in range(rounds))
    compared = best(timed(pairs, compare) for _ in range(rounds))
    gc.unfreeze()
    by_lookups = {
        str(count): p50([taken for taken, n in zip(segments, lookups, strict=True) if n == count])
        for count in sorted(set(lookups))
    }
    return {
        "match_us_p50": p50(segments),
        "match_us_p99": p99(segments),
        "match_us_p50_by_lookups": by_lookups,
        "match_dict_us_p50": p50(as_dict),
        "match_dict_us_p99": p99(as_dict),
        "match_one_engine_us_p50": p50(for_one),
        "match_partial_us_p50": p50(partly),
        "compare_us_p50": p50(compared),
    }


def measure_changes(shape: Shape, index: PrefixIndex, families: range, rounds: int) -> tuple[float, float, float]:
    """Median microseconds of an insert at the bound, of one with room, of an eviction."""
    unbounded = index.max_bytes

    def insert(path: Path) -> None:
        index.insert(path.home, path.tokens, path.engine)

    evicting, roomy, evictions = [], [], []
    for number in range(rounds):
        with_room = list(shape.forks(families, OPERATIONS, seed=2 * number))
        at_bound = list(shape.forks(families, OPERATIONS, seed=2 * number + 1))
        gc.collect()
        gc.freeze()
        roomy.append(timed(with_room, insert))
        index.max_bytes = index.statistics().bytes
        evicting.append(timed(at_bound, insert))
        index.max_bytes = unbounded
        evictions.append(timed(range(OPERATIONS), lambda _: index.evict(1)))
        gc.unfreeze()
    return p50(best(evicting)), p50(best(roomy)), p50(best(evictions))


def measure_sweeps(shape: Shape) -> list[float]:
    """Milliseconds of every sweep after engines, then the owner, left."""
    index = shape.empty_index()
    shape.fill(index, range(shape.families))
    gc.collect()
    gc.freeze()
    taken = []
    for engine in range(0, ENGINES, 8):
        index.drop_engine(f"engine-{engine}/0")
    for owner in ("nobody", "run"):
        index.drop_owner(owner)
        steps = 1
        while steps:
            start = time.perf_counter()
            steps = index.sweep(SWEEP_NODES)
            taken.append((time.perf_counter() - start) * 1e3)
    gc.unfreeze()
    return taken


def measure_memory(shape: Shape) -> Figures:
    gc.collect()
    tracemalloc.start()
    try:
        index = shape.empty_index()
        shape.fill(index, range(shape.families))
        gc.collect()
        traced_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    held = index.statistics()
    return {
        "bytes_per_page": round(traced_bytes / held.pages, 1),
        "counted_bytes_per_page": round(held.bytes / held.pages, 1),
        "pages": held.pages,
        "nodes": held.nodes,
    }


def measure(shape: Shape, rounds: int = ROUNDS) -> Figures:
    figures: Figures = {}
    changes = {}
    for percent in FILL_PERCENT:
        families = range(max(1, shape.families * percent // 100))
        index = shape.empty_index()
        shape.fill(index, families)
        if percent == 100:
            figures |= measure_matches(shape, index, rounds * MATCH_ROUNDS)
        changes[str(percent)] = measure_changes(shape, index, families, rounds)
        del index
    figures["insert_us_p50"], figures["insert_with_room_us_p50"], figures["evict_us_p50"] = changes["100"]
    for place, name in enumerate(("insert", "insert_with_room", "evict")):
        figures[f"{name}_us_p50_by_fill"] = {percent: changes[percent][place] for percent in sorted(changes, key=int)}
    repeats = [measure_sweeps(shape) for _ in range(SWEEP_REPEATS)]
    figures["sweep_slice_max_ms"] = round(max(min(same) for same in zip(*repeats, strict=True)), 3)
    return figures | measure_memory(shape)


def main() -> None:
    parser = argparse.ArgumentParser(description="cost of the prefix index")
    parser.add_argument("--scale", type=float, default=1.0, help="1: a million pages")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    measured = shapes(arguments.scale)
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        results = list(pool.map(partial(measure, rounds=arguments.rounds), measured))
    names = [shape.name for shape in measured]
    figures = {key: dict(zip(names, (one[key] for one in results), strict=True)) for key in results[0]}
    table = Table("figure", *names, "bar")
    for key, by_shape in figures.items():
        table.add_row(key, *(_cell(value) for value in by_shape.values()), BARS.get(key, ""))
    Console(width=120).print(table)
    print(json.dumps(figures))


def _cell(value: object) -> str:
    return "  ".join(f"{key}: {one}" for key, one in value.items()) if isinstance(value, dict) else str(value)


if __name__ == "__main__":
    main()
