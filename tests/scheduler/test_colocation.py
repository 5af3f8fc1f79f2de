"""Engine memory follows a colocated trainer: released only when idle, taken back once, weights published again."""

from __future__ import annotations

from rolloutd.scheduler.actions import PublishEnded
from rolloutd.scheduler.events import JoinEngine, LoseEngine
from rolloutd.scheduler.states import FaultKind, ReleaseMemory, TrainerState, UpdateMode, Verb
from tests.scheduler.kit import RUN, Bench, engine, spec


def colocated(release: ReleaseMemory = ReleaseMemory.KV_CACHE) -> Bench:
    bench = Bench(engine(run_id=RUN, page_tokens=16))
    bench.configure(release_memory=release)
    return bench


def test_memory_goes_to_the_trainer_when_nothing_runs_and_comes_back() -> None:
    bench = colocated()
    bench.run(spec("r"))
    bench.step(1, TrainerState.TRAINING)
    assert bench.leaving() == {"r"} and bench.out() is None, "it asserts idle: nothing before the last one left"
    bench.stopped("r", 5)
    assert bench.out() is Verb.RELEASE_MEMORY and bench.controls["e0"].tags == ("kv_cache",)
    bench.answer()
    assert not bench.tick()
    bench.step(1, TrainerState.WAITING)
    assert bench.out() is Verb.RESUME_MEMORY
    assert not bench.tick()
    bench.answer()
    (again,) = bench.tick()
    assert again.max_new_tokens == 11
    bench.finish("r", 11)
    assert bench.whole("r")


def test_the_cache_is_gone_with_the_memory() -> None:
    bench = colocated()
    bench.run(spec("a", token_bytes=spec("x", 64).token_bytes))
    bench.finish("a")
    bench.step(1, TrainerState.TRAINING)
    bench.answer()
    bench.step(1, TrainerState.WAITING)
    bench.answer()
    (again,) = bench.run(spec("b", token_bytes=spec("x", 64).token_bytes))
    assert bench.core._world.attempts[again.attempt_id].predicted_tokens == 0


def test_a_trainer_that_changes_its_mind_is_followed() -> None:
    bench = colocated()
    bench.run(spec("r"))
    bench.step(1, TrainerState.TRAINING)
    bench.step(1, TrainerState.WAITING)
    bench.stopped("r", 3)
    assert bench.out() is None
    assert bench.tick()
    bench.write("r", 1)
    bench.step(1, TrainerState.TRAINING)
    bench.stopped("r", 3)
    bench.step(1, TrainerState.WAITING)
    assert bench.out() is Verb.RELEASE_MEMORY
    bench.answer()
    assert bench.out() is Verb.RESUME_MEMORY
    bench.step(2, TrainerState.TRAINING)
    bench.answer()
    assert bench.out() is Verb.RELEASE_MEMORY


def test_weights_that_were_given_up_have_to_be_published_again() -> None:
    bench = colocated(ReleaseMemory.KV_CACHE_AND_WEIGHTS)
    bench.published(1)
    bench.step(1, TrainerState.TRAINING)
    bench.answer()
    bench.publish(2, mode=UpdateMode.RETRACT)
    assert bench.out() is None, "its memory is the trainer's"
    bench.step(1, TrainerState.SYNCING)
    bench.answer_through(Verb.RESUME_MEMORY)
    bench.finish_updates()
    assert bench.engine("e0").version == 2 and not bench.engine("e0").quarantine


def test_without_a_new_version_the_last_one_is_loaded_again() -> None:
    bench = colocated(ReleaseMemory.KV_CACHE_AND_WEIGHTS)
    bench.published(1)
    bench.step(1, TrainerState.TRAINING)
    bench.answer()
    bench.step(1, TrainerState.WAITING)
    bench.answer()
    assert bench.out() is Verb.PAUSE
    bench.finish_updates()
    assert bench.engine("e0").is_open(bench.now)


def test_an_update_ends_before_memory_is_released() -> None:
    bench = colocated()
    bench.publish(1)
    bench.step(1, TrainerState.TRAINING)
    assert bench.out() is Verb.PAUSE
    bench.answer_through(Verb.RESUME)
    assert bench.out() is Verb.RELEASE_MEMORY


def test_a_refused_release_changes_nothing_and_a_broken_one_is_not_guessed_at() -> None:
    bench = colocated()
    bench.step(1, TrainerState.TRAINING)
    bench.call_fails(fault=FaultKind.REFUSED)
    assert bench.engine("e0").is_open(bench.now)
    bench.step(2, TrainerState.WAITING)
    assert bench.out() is None
    bench.step(3, TrainerState.TRAINING)
    bench.call_fails(fault=FaultKind.BROKEN)
    bench.step(4, TrainerState.WAITING)
    assert bench.out() is None and not bench.engine("e0").is_open(bench.now)
    bench.do(JoinEngine(engine(run_id=RUN, incarnation="2")))
    assert bench.engine("e0").is_open(bench.now)


def test_other_runs_engines_and_shared_ones_are_left_alone() -> None:
    bench = Bench(engine("mine", run_id=RUN), engine("shared"), engine("theirs", run_id="other"))
    bench.configure(release_memory=ReleaseMemory.KV_CACHE)
    bench.step(1, TrainerState.TRAINING)
    assert set(bench.controls) == {"mine"}


def test_an_engine_that_is_lost_is_asked_for_nothing() -> None:
    """Another process may answer, which released nothing: the call would kill it."""
    bench = colocated()
    bench.step(1, TrainerState.TRAINING)
    bench.answer()
    bench.do(LoseEngine("e0", "connection refused"))
    bench.step(2, TrainerState.WAITING)
    bench.pass_time(3.0)
    assert bench.out() is None
    bench.do(JoinEngine(engine(run_id=RUN)))  # it was the network
    bench.pass_time(2.0)
    assert bench.out() is Verb.RESUME_MEMORY


def test_an_engine_that_is_lost_is_not_asked_to_release() -> None:
    bench = colocated()
    bench.do(LoseEngine("e0", "connection refused"))
    bench.step(1, TrainerState.TRAINING)
    bench.pass_time(1.0)
    assert bench.out() is None
    bench.do(JoinEngine(engine(run_id=RUN)))
    bench.tick()
    assert bench.out() is Verb.RELEASE_MEMORY


def test_memory_that_was_not_taken_back_is_asked_for_again() -> None:
    bench = colocated()
    bench.step(1, TrainerState.TRAINING)
    bench.answer()
    bench.step(2, TrainerState.WAITING)
    bench.call_fails(fault=FaultKind.UNREACHED)
    assert not bench.engine("e0").is_open(bench.now)
    bench.pass_time(2.0)
    assert bench.out() is Verb.RESUME_MEMORY
    bench.answer()
    assert bench.engine("e0").is_open(bench.now)


def test_a_version_does_not_make_up_for_memory_that_is_lost() -> None:
    bench = colocated()
    bench.step(1, TrainerState.TRAINING)
    bench.answer()
    bench.step(2, TrainerState.WAITING)
    bench.call_fails(fault=FaultKind.SILENT)
    bench.publish(1)
    assert bench.out() is None
    (end,) = (one for one in bench.said if isinstance(one, PublishEnded))
    assert end.failed == ("e0",)
    assert "restart it" in bench.engine("e0").held_because
    bench.do(JoinEngine(engine(run_id=RUN, incarnation="2")))
    bench.finish_updates()
    assert bench.engine("e0").is_open(bench.now) and bench.engine("e0").version == 1
