"""The figures of `make bench-publish`, on less work: what a gap is, and what an expiry says."""

from __future__ import annotations

from typing import Any

import pytest

from rolloutd.bench import publish_expiry
from rolloutd.bench.publish_gaps import gap_of


def activity(rests: list[tuple[float, float]], resume: float = 12.0) -> dict[str, Any]:
    calls = [
        ("pause", 1.0, 1.0),
        ("resume", 2.0, 2.0),
        ("pause", 10.0, 11.0),
        ("load_from_disk", 11.2, 11.7),
        ("resume", resume, resume),
    ]
    return {"now": 20.0, "calls": calls, "rests": rests}


def test_a_gap_is_the_rest_without_the_load_and_with_abort_without_the_pause_call() -> None:
    news = activity([(0.0, 0.5), (10.1, 12.3), (15.0, 15.5)])
    assert gap_of(news, 9.0, "retract") == pytest.approx((2.2, 1.7))
    assert gap_of(news, 9.0, "abort_and_resume") == pytest.approx((2.2, 0.8))


def test_several_rests_count_together_and_those_before_the_pause_do_not() -> None:
    news = activity([(9.0, 10.2), (10.4, 11.0), (11.1, 12.1)])
    assert gap_of(news, 9.0, "in_place") == pytest.approx((1.8, 1.3))


def test_an_engine_that_has_not_gone_on_has_no_gap_yet() -> None:
    assert gap_of(activity([(0.0, 0.5)]), 9.0, "retract") is None
    not_resumed = activity([(10.0, 12.5)])
    not_resumed["calls"] = not_resumed["calls"][:4]
    assert gap_of(not_resumed, 9.0, "retract") is None


def test_an_expiry_is_declared_once_per_engine_and_swept_to_the_end() -> None:
    expiry = publish_expiry.best(0.01, 1)
    assert expiry.pages == 25_000
    assert 0.0 < expiry.declare_ms <= expiry.event_max_ms
    assert len(expiry.slices_ms) > 1
