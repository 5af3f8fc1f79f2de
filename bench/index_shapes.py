"""The two trees that the index is measured on: plain groups that fork, and deep chains that wander over engines.

A   2,000 prompts x 8 forks. A prompt lies on two engines, four of its forks on each: a path is two nodes, two masks.
B   50 system prefixes, 2,000 chains of seven turns with two branches off each turn but the last, which has one. A system
    prefix lies on 48 of 64 engines, every turn on six engines fewer: 4,096 tokens are seven nodes with seven masks. Three
    policy versions are live. A chain lies in one of them: 12 of 20 in the current one, 5 in the one before, 3 in the oldest,
    as where running chains move on with the policy. So 12 of 20 queries are covered by the first version looked up, the
    others first hit the system prefix in one or two newer ones.

Invariants
- A family (a prompt with its forks, or a chain with its branches) is a function of its number alone, so nothing has to be
  kept for making a query from it later, and half the families are half the tree.
- Queries are 4,096 tokens that the index knows to the last page.

What this module does not know: how the index works, and time.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rolloutd.scheduler.index import Namespace, PrefixIndex

PAGE_TOKENS = 16
QUERY_PAGES = 256  # 4,096 tokens
NEW_PAGES = 56  # what one measured insert adds to a known path: an answer of 896 tokens
PAGE_BYTES = 4 * PAGE_TOKENS
VOCABULARY = 151_936
ENGINES = 64
# Far above what any engine is credited with here: it never binds, but its bookkeeping is paid for, as in the core.
ENGINE_CACHE_TOKENS = 1 << 26


class Path(NamedTuple):
    """Something to look up or to insert; `namespaces` newest version first, `home` the one that holds it."""

    namespaces: tuple[Namespace, ...]
    home: Namespace
    tokens: bytes
    engine: str


def pages_of(count: int, source: np.random.Generator) -> bytes:
    return source.integers(0, VOCABULARY, count * PAGE_TOKENS, dtype=np.uint32).tobytes()


@dataclass(frozen=True)
class Shape(ABC):
    name: str
    families: int

    @abstractmethod
    def family(self, number: int) -> list[Path]:
        """Every path that makes the family, in the order of insertion."""

    @abstractmethod
    def query(self, number: int) -> Path:
        """The family's known 4,096 tokens."""

    def empty_index(self, max_bytes: int = 1 << 40) -> PrefixIndex:
        index = PrefixIndex(max_bytes, PAGE_TOKENS)
        for engine in range(ENGINES):
            index.add_engine(f"engine-{engine}/0", PAGE_TOKENS, ENGINE_CACHE_TOKENS)
        return index

    def fill(self, index: PrefixIndex, families: range) -> None:
        for number in families:
            for path in self.family(number):
                index.insert(path.home, path.tokens, path.engine)

    def queries(self, count: int, seed: int) -> list[Path]:
        """Of distinct families, in random order."""
        numbers = random.Random(seed).sample(range(self.families), min(count, self.families))
        return [self.query(number) for number in numbers]

    def forks(self, families: range, count: int, seed: int) -> Iterator[Path]:
        """New paths: a known one up to a random page, then `NEW_PAGES` that nobody has."""
        rng = random.Random(seed)
        source = np.random.default_rng(seed)
        for _ in range(count):
            known = self.query(rng.choice(families))
            cut = rng.randrange(1, len(known.tokens) // PAGE_BYTES) * PAGE_BYTES
            yield known._replace(tokens=known.tokens[:cut] + pages_of(NEW_PAGES, source))


class ShapeA(Shape):
    STEM_PAGES = 220
    TAIL_PAGES = (36, 35, 35, 35, 35, 35, 35, 34)  # 500 pages a family; the first path is a whole query

    def family(self, number: int) -> list[Path]:
        source = np.random.default_rng((1, number))
        stem = pages_of(self.STEM_PAGES, source)
        engines = source.choice(ENGINES, 2, replace=False)
        space = Namespace("run", "policy", "", 0, "")
        return [
            Path((space,), space, stem + pages_of(tail, source), f"engine-{engines[fork % 2]}/0")
            for fork, tail in enumerate(self.TAIL_PAGES)
        ]

    def query(self, number: int) -> Path:
        return self.family(number)[0]


class ShapeB(Shape):
    SYSTEMS = 50
    SYSTEM_PAGES = 48
    TURNS = 7
    TURN_PAGES = 36
    BRANCH_PAGES = 18
    HOLDERS = 48
    FEWER_PER_TURN = 6
    SPACES = tuple(Namespace("run", "policy", "", version, "") for version in (2, 1, 0))
    AGES = (0,) * 12 + (1,) * 5 + (2,) * 3  # versions back

    def family(self, number: int) -> list[Path]:
        system = number % self.SYSTEMS
        shared = np.random.default_rng((2, system))
        source = np.random.default_rng((3, number))
        trunk = [pages_of(self.SYSTEM_PAGES, shared)]
        engines = [f"engine-{one}/0" for one in source.permutation(shared.permutation(ENGINES)[: self.HOLDERS])]
        home = self.SPACES[self.AGES[number // self.SYSTEMS % len(self.AGES)]]
        for _ in range(self.TURNS):
            trunk.append(trunk[-1] + pages_of(self.TURN_PAGES, source))
        holders = [(trunk[self.TURNS - rank // self.FEWER_PER_TURN], engine) for rank, engine in enumerate(engines)]
        branches = [
            (trunk[turn] + pages_of(self.BRANCH_PAGES, source), engine)
            for turn in range(1, self.TURNS + 1)
            for engine in engines[: 2 if turn < self.TURNS else 1]  # engines that hold the whole trunk
        ]
        paths = [Path(self.SPACES, home, tokens, engine) for tokens, engine in holders + branches]
        return [paths[place] for place in source.permutation(len(paths))]

    def query(self, number: int) -> Path:
        longest = max(self.family(number), key=lambda path: len(path.tokens))
        return longest._replace(tokens=longest.tokens[: QUERY_PAGES * PAGE_BYTES])


def shapes(scale: float = 1.0) -> tuple[Shape, Shape]:
    """A and B; `scale` 1 is production size, about a million pages each."""
    return ShapeA("A", max(ShapeB.SYSTEMS, round(2000 * scale))), ShapeB("B", max(ShapeB.SYSTEMS, round(2000 * scale)))
