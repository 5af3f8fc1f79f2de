"""Engines' reports of their KV caches in the core: whose the blocks are, across runs, versions and processes."""

from __future__ import annotations

import pytest

from rolloutd.scheduler.events import KvCacheChanged, RemoveEngine
from rolloutd.scheduler.kv_changes import KvChange, KvCleared, KvRemoved, KvStored, KvUnknown
from rolloutd.scheduler.states import CacheHandling, UpdateMode
from tests.scheduler.kit import Bench, engine, prompt, spec

TOKENS = 64  # four pages
PAGE_TOKENS = 16
WHOLE = TOKENS - PAGE_TOKENS  # of a cached prompt, what need not be computed: its last token always is


def ready(*, slots: int = 4) -> Bench:
    """An engine with pages of 16, and a run that has used it."""
    bench = Bench(engine(slots=slots, page_tokens=PAGE_TOKENS))
    bench.run(spec("first", TOKENS))
    bench.finish("first", 16)
    return bench


def stored(name: str, first: int = 1, salt: str = "") -> KvStored:
    return KvStored(tuple(range(first, first + TOKENS // PAGE_TOKENS)), None, prompt(name, TOKENS), salt)


def report(bench: Bench, *changes: KvChange, incarnation: str = "1") -> None:
    bench.do(KvCacheChanged("e0", incarnation, changes))


def predicted(bench: Bench, rollout_id: str, name: str, run: str = "run") -> int:
    """Tokens that a rollout with this prompt was expected to find cached."""
    bench.run(spec(rollout_id, token_bytes=prompt(name, TOKENS)), run=run)
    tokens = bench.live[rollout_id]
    attempt = bench.core._world.attempts[tokens.attempt_id]
    found = attempt.predicted_tokens
    bench.finish(rollout_id, 16)
    return found


def test_a_prompt_that_somebody_else_sent_is_expected_in_the_cache() -> None:
    bench = ready()
    report(bench, stored("theirs"))
    assert predicted(bench, "r", "theirs") == WHOLE


def test_an_evicted_prompt_is_not_expected_any_more_though_it_was_ours() -> None:
    bench = ready()
    report(bench, stored("first"))
    assert predicted(bench, "again", "first") == WHOLE
    report(bench, KvRemoved((3, 4)))
    assert predicted(bench, "later", "first") == TOKENS // 2


@pytest.mark.parametrize("change", [KvCleared(), KvUnknown("message 7 is not kept")])
def test_entries_that_wait_forget_what_they_were_told_of_a_cleared_cache(change: KvChange) -> None:
    bench = ready(slots=1)
    report(bench, stored("warm"))
    bench.run(spec("blocks", TOKENS))
    bench.submit(spec("waits", token_bytes=prompt("warm", TOKENS)))
    bench.tick()
    report(bench, change)
    bench.finish("blocks", 16)
    bench.tick()
    assert bench.core._world.attempts[bench.live["waits"].attempt_id].predicted_tokens == 0
    assert bool(bench.records("kv_events_reset")) is isinstance(change, KvUnknown)


def test_reports_of_another_process_or_engine_are_passed_over() -> None:
    bench = ready()
    report(bench, stored("theirs"), incarnation="0")
    bench.do(KvCacheChanged("nobody", "1", (stored("theirs"),)))
    assert predicted(bench, "r", "theirs") == 0


def test_an_engine_that_left_is_followed_no_more() -> None:
    bench = ready()
    report(bench, stored("theirs"))
    assert bench.core.engine_views()[0].kv_blocks_reported == 4
    bench.do(RemoveEngine("e0"))
    report(bench, stored("theirs", 10))
    assert bench.core._world.mirror.bytes == 0


def test_a_second_run_on_the_engine_makes_reports_only_take_away() -> None:
    bench = ready()
    bench.run(spec("other", TOKENS), run="second")
    report(bench, stored("theirs"), stored("first", 10))
    assert predicted(bench, "r", "theirs") == 0
    report(bench, KvRemoved((13,)))
    assert predicted(bench, "again", "first") == 3 * PAGE_TOKENS


def test_after_a_publication_with_a_flush_only_what_is_stored_afterwards_counts() -> None:
    bench = ready()
    report(bench, stored("theirs"))
    bench.published(1)
    report(bench, KvCleared(), stored("new", 20))
    assert predicted(bench, "old", "theirs") == 0
    assert predicted(bench, "new", "new") == WHOLE


def test_a_late_report_under_the_old_salt_earns_nothing_for_the_new_version() -> None:
    bench = ready()
    bench.published(1, mode=UpdateMode.IN_PLACE, cache=CacheHandling.NAMESPACE)
    salt = bench.engine("e0").salt
    assert salt
    report(bench, stored("late"), stored("new", 20, salt))
    assert predicted(bench, "late", "late") == 0
    assert predicted(bench, "new", "new") == WHOLE


def test_where_the_cache_was_kept_nobody_can_tell_old_blocks_from_new_ones() -> None:
    bench = ready()
    bench.published(1, mode=UpdateMode.IN_PLACE, cache=CacheHandling.KEEP)
    report(bench, stored("late"))
    assert predicted(bench, "late", "late") == 0
    report(bench, KvRemoved((1,)))
    assert predicted(bench, "again", "late") == 0
