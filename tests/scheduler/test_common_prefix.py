"""Tokens that every live engine has favour nobody; an engine that could not serve the prompt has no say in that."""

from __future__ import annotations

import pytest

from rolloutd.scheduler.common_prefix import common_hit
from rolloutd.scheduler.entry import Entry
from rolloutd.scheduler.events import DrainEngine, LoseEngine
from rolloutd.scheduler.lineage import Lineage
from rolloutd.scheduler.spec import EngineFacts
from tests.scheduler.kit import RUN, Bench, config, engine, engines, prompt, spec

PROMPT = prompt("p", 160)


def waiting(*facts: EngineFacts) -> tuple[Bench, Entry]:
    """All slots are taken, one rollout of `PROMPT` waits; engine n holds 160 - 16 n tokens of it."""
    bench = Bench(*facts)
    count = sum(one.slots for one in facts)
    bench.run(*(spec(f"busy{number}", max_new_tokens=40) for number in range(count)))
    bench.submit(spec("waits", token_bytes=PROMPT))
    (entry,) = bench.its_run().entries.values()
    index = bench.core._world.index
    for number, one in enumerate(facts):
        held = PROMPT[: 4 * (160 - 16 * number)]
        index.insert(Lineage(RUN, "policy").namespace(0), held, bench.engine(one.engine_id).cache_key)
    look(bench, entry)
    return bench, entry


def look(bench: Bench, entry: Entry) -> None:
    entry.segments = bench.core._world.index.segments(Lineage(RUN, "policy").namespace(0), PROMPT)


def common(bench: Bench, entry: Entry) -> int:
    return common_hit(bench.core._world, entry)


def test_the_least_that_any_engine_has() -> None:
    bench, entry = waiting(*(engine(f"e{number}", 1) for number in range(3)))
    assert common(bench, entry) == 128


def test_one_engine_alone_has_nothing_in_common() -> None:
    bench, entry = waiting(engine("e0", 1))
    assert common(bench, entry) == 0


def test_one_that_has_nothing_makes_it_nothing_unless_it_is_gone() -> None:
    bench, entry = waiting(*(engine(f"e{number}", 1) for number in range(3)))
    bench.core._world.index.clear_engine(bench.engine("e2").cache_key)
    look(bench, entry)
    assert common(bench, entry) == 0
    bench.do(LoseEngine("e2", "gone"))
    assert common(bench, entry) == 144
    bench.do(DrainEngine("e1"))
    assert common(bench, entry) == 0  # one is left


def test_one_that_could_not_serve_it_does_not_count() -> None:
    small = engine("e2", 1, context_tokens=100)
    bench, entry = waiting(engine("e0", 1), engine("e1", 1), small)
    assert common(bench, entry) == 144


@pytest.mark.parametrize(("marginal", "first"), [(True, "fresh"), (False, "shared")], ids=["marginal", "switched off"])
def test_what_every_engine_has_does_not_go_before_what_has_waited_longer(marginal: bool, first: str) -> None:
    bench = Bench(*engines(2, 1), settings=config(queue={"marginal_credit": marginal}))
    bench.run(spec("busy0"), spec("busy1"))
    for one in engines(2, 1):
        bench.core._world.index.insert(
            Lineage(RUN, "policy").namespace(0), PROMPT, bench.engine(one.engine_id).cache_key
        )
    bench.submit(spec("fresh", 160))
    bench.now += 5.0
    bench.submit(spec("shared", token_bytes=PROMPT))
    bench.finish("busy0")
    assert [one.rollout_id for one in bench.tick()] == [first]
