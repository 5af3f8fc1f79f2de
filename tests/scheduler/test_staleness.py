"""How many samples may be on their way: reserved by group, occupied, consumed; restarts; settings."""

from __future__ import annotations

from rolloutd.scheduler.events import AttachConsumer
from rolloutd.scheduler.spec import Quota
from rolloutd.scheduler.states import Gate, Origin, TaskType
from tests.scheduler.kit import BACKGROUND, CONSUMER, CRITICAL, RUN, Bench, engine, spec


def bounded(batch_samples: int = 4, max_staleness: int = 1) -> Bench:
    bench = Bench(engine(slots=64, kv_capacity_tokens=1 << 20))
    bench.configure(batch_samples=batch_samples, max_staleness=max_staleness)
    return bench


def started(bench: Bench) -> list[str]:
    names = [one.rollout_id for one in bench.tick()]
    for name in names:
        bench.write(name, 1)
    return names + ([] if not names else started(bench))


def finish(bench: Bench, *names: str) -> None:
    for name in names:
        bench.finish(name)


def test_no_more_samples_than_a_few_steps_take_are_on_their_way() -> None:
    bench = bounded()
    bench.submit(*(spec(f"r{index:02}") for index in range(20)))
    first = started(bench)
    assert len(first) == 8
    finish(bench, *first)
    assert not started(bench), "generated and not taken counts as well"
    assert bench.view("r19").gate is Gate.STALENESS
    bench.acknowledge(*first[:3], used=True)
    assert len(started(bench)) == 3
    view = bench.run_view()
    assert (view.samples_on_their_way, view.samples_allowed) == (8, 8)


def test_groups_are_let_in_as_a_whole() -> None:
    bench = bounded(batch_samples=5, max_staleness=1)  # room for 10
    bench.submit(*(spec(f"g{index}", samples=4, token_bytes=spec(f"g{index}", 8).token_bytes) for index in range(4)))
    names = started(bench)
    assert {name.split("/")[0] for name in names} == {"g0", "g1"} and len(names) == 8
    finish(bench, *names)
    bench.acknowledge(*(name for name in names if name.startswith("g0")))
    assert {name.split("/")[0] for name in started(bench)} == {"g2"}


def test_a_group_that_is_let_in_does_not_wait_behind_others() -> None:
    bench = bounded(batch_samples=4, max_staleness=0)
    bench.submit(spec("first"))
    names = started(bench)
    bench.submit(*(spec(f"g{index}", group_id="g", group_size=6) for index in range(2)), spec("between"))
    bench.submit(*(spec(f"g{index}", group_id="g", group_size=6) for index in range(2, 6)))
    assert not started(bench), "more than fits beside the first"
    finish(bench, *names)
    bench.acknowledge(*names)
    members = started(bench)
    assert sorted(members) == [f"g{index}" for index in range(6)], "the whole group, with six prompts"
    finish(bench, *members)
    bench.acknowledge(*members)
    assert started(bench) == ["between"]


def test_what_comes_later_and_fits_does_not_go_before_a_group_that_waits_for_room() -> None:
    bench = bounded(batch_samples=4, max_staleness=0)
    bench.submit(spec("r0"))
    names = started(bench)
    bench.submit(spec("big", samples=4))
    for index in range(1, 8):  # a stream of single samples would keep it out for ever
        bench.submit(spec(f"r{index}"))
        finish(bench, *names)
        bench.acknowledge(*names)
        names = started(bench)
        if "big/0" in names:
            break
    assert sorted(names) == [f"big/{index}" for index in range(4)]


def test_a_group_larger_than_the_bound_goes_alone() -> None:
    bench = bounded(batch_samples=1, max_staleness=0)
    bench.submit(spec("big", samples=6), spec("small"))
    names = started(bench)
    assert {name.split("/")[0] for name in names} == {"big"} and len(names) == 6
    finish(bench, *names)
    bench.acknowledge(*names)
    assert started(bench) == ["small"]


def test_failed_and_cancelled_samples_make_room_at_once() -> None:
    bench = bounded(batch_samples=2, max_staleness=0)
    bench.submit(*(spec(f"r{index}") for index in range(4)))
    first = started(bench)
    bench.cancel(first[0])
    bench.stopped(first[0], 1)
    assert len(started(bench)) == 1
    bench.cancel("r3")
    bench.acknowledge("r3")
    assert bench.its_run().window is not None
    assert bench.its_run().window.outstanding == 2  # type: ignore[union-attr]


def test_an_acknowledgement_counts_once() -> None:
    bench = bounded(batch_samples=2, max_staleness=0)
    bench.submit(*(spec(f"r{index}") for index in range(6)))
    first = started(bench)
    finish(bench, *first)
    bench.acknowledge(first[0])
    bench.acknowledge(first[0])
    assert len(started(bench)) == 1


def test_other_work_is_not_bounded() -> None:
    bench = bounded(batch_samples=1, max_staleness=0)
    bench.submit(
        spec("a"),
        spec("b"),
        spec("reward", task_type=TaskType.REWARD),
        spec("evaluation", origin=Origin.EVALUATION),
    )
    assert sorted(started(bench)) == ["a", "evaluation", "reward"]


def test_critical_groups_are_let_in_first() -> None:
    from tests.scheduler.kit import BACKGROUND

    bench = bounded(batch_samples=1, max_staleness=0)
    bench.submit(spec("first"), spec("low", rollout_class=BACKGROUND), spec("high", rollout_class=CRITICAL))
    finish(bench, *started(bench))
    bench.acknowledge("first")
    assert started(bench) == ["high"]


def test_an_interrupted_sample_keeps_its_room() -> None:
    bench = bounded(batch_samples=1, max_staleness=0)
    bench.submit(spec("a"), spec("b"))
    assert started(bench) == ["a"]
    bench.budget(max_rollouts=0)
    bench.stopped("a", 3)
    bench.budget()
    assert started(bench) == ["a"]


def test_a_trainer_that_starts_again_at_a_high_version_has_its_whole_room() -> None:
    bench = bounded(batch_samples=2, max_staleness=1)
    bench.published(1000)
    bench.submit(*(spec(f"r{index}") for index in range(10)))
    first = started(bench)
    assert len(first) == 4
    finish(bench, *first[:3])  # the old trainer will never take these
    bench.do(AttachConsumer(RUN, CONSUMER, epoch=1))
    assert len(started(bench)) == 3


def test_room_that_was_announced_and_never_used_comes_back() -> None:
    bench = bounded(batch_samples=2, max_staleness=1)
    bench.submit(spec("a", group_id="g", group_size=4), spec("b"))
    assert started(bench) == ["a"]
    bench.finish("a")
    bench.acknowledge("a")
    bench.pass_time(3.0)
    assert "b" in bench.live


def test_the_bound_can_be_changed_and_taken_away() -> None:
    bench = bounded(batch_samples=1, max_staleness=0)
    bench.submit(*(spec(f"r{index}") for index in range(5)))
    assert len(started(bench)) == 1
    bench.configure(batch_samples=3, max_staleness=0)
    assert len(started(bench)) == 2
    bench.configure()
    assert len(started(bench)) == 2
    finish(bench, *list(bench.live))
    bench.acknowledge(*(f"r{index}" for index in range(5)))
    bench.quiet()


def test_samples_that_join_a_group_are_let_in_with_all_that_were_submitted_together() -> None:
    bench = bounded(batch_samples=4, max_staleness=0)
    bench.submit(spec("a"), spec("b", group_id="g"))
    assert started(bench) == ["a", "b"]
    finish(bench, "b")
    bench.acknowledge("b")
    bench.submit(spec("more", samples=4, group_id="g"))
    assert not started(bench), "four beside one are more than four"
    finish(bench, "a")
    bench.acknowledge("a")
    assert len(started(bench)) == 4


def test_a_sample_that_joins_a_group_and_its_prompt_later_counts() -> None:
    bench = bounded(batch_samples=4, max_staleness=0)
    bench.submit(spec("a", samples=2, group_id="g"))
    bench.submit(spec("b", group_id="g"))
    bench.submit(spec("c", group_id="g", token_bytes=spec("b").token_bytes))
    bench.submit(spec("d"))
    assert set(started(bench)) == {"a/0", "a/1", "b", "c"}
    assert bench.run_view().samples_on_their_way == 4


def test_a_floor_is_not_kept_for_work_that_is_not_let_in() -> None:
    bench = bounded(batch_samples=2, max_staleness=0)
    bench.budget(max_rollouts=1, classes={CRITICAL: Quota(floor_rollouts=1)})
    bench.submit(spec("first", rollout_class=BACKGROUND), spec("group", samples=2, rollout_class=CRITICAL))
    assert started(bench) == ["first"]


def test_all_of_a_group_go_once_it_is_let_in_whoever_waits_before_them() -> None:
    bench = bounded(batch_samples=2, max_staleness=0)
    bench.submit(spec("first"), spec("g1", group_id="g", group_size=2), spec("lone"), spec("g2", group_id="g"))
    assert started(bench) == ["first"]
    finish(bench, "first")
    bench.acknowledge("first")
    assert started(bench) == ["g1", "g2"], "they would keep the one before the last from its room for ever"
    finish(bench, "g1", "g2")
    bench.acknowledge("g1", "g2")
    assert started(bench) == ["lone"]


def test_small_ones_do_not_pass_a_large_group_for_ever() -> None:
    bench = bounded(batch_samples=4, max_staleness=0)
    bench.submit(spec("a"), spec("b"))
    assert started(bench) == ["a", "b"]
    bench.submit(spec("large", samples=4), spec("c"), spec("d"))
    assert not started(bench)
    finish(bench, "a", "b")
    bench.acknowledge("a", "b")
    assert len(started(bench)) == 4


def test_when_a_group_that_waits_is_cancelled_those_behind_it_go() -> None:
    bench = bounded(batch_samples=4, max_staleness=0)
    bench.submit(spec("a"))
    assert started(bench) == ["a"]
    bench.submit(spec("large", samples=4), spec("c"))
    assert not started(bench)
    bench.cancel("large")
    assert started(bench) == ["c"]


def test_samples_are_counted_beside_other_work_of_their_group_and_prompt() -> None:
    bench = bounded(batch_samples=4, max_staleness=0)
    for name in ("g", "h"):
        fields = {"group_id": name, "group_size": 5, "token_bytes": spec(name).token_bytes}
        bench.submit(
            spec(f"{name}-evaluation", origin=Origin.EVALUATION, **fields),
            *[spec(f"{name}-{number}", **fields) for number in range(4)],
        )
    names = [name for name in started(bench) if "evaluation" not in name]
    assert {name[0] for name in names} == {"g"} and len(names) == 4
