"""What waits is in the order of the settings that are in force, whichever of them was changed."""

from __future__ import annotations

from rolloutd.scheduler.events import ConfigureRun, Reconfigure
from rolloutd.scheduler.lengths import LengthModel
from rolloutd.scheduler.spec import RunSettings
from tests.scheduler.kit import RUN, Bench, config, engine, spec


def behind(bench: Bench) -> None:
    """Speeds are known, `a` has the prompt of "first", and "again" has it too and waits."""
    shared = spec("first", 64)
    bench.run(shared, spec("other", 64))
    bench.now += 1.0
    for name in ("first", "other"):
        bench.finish(name, 16)
    bench.run(spec("k0", 64, max_new_tokens=900), spec("k1", 64, max_new_tokens=900))
    bench.submit(spec("again", 64, token_bytes=shared.token_bytes))
    bench.tick()


def key(bench: Bench) -> float:
    (entry,) = [one for one in bench.its_run().entries.values() if one.members[0].rollout_id == "again"]
    return entry.static_key


def test_keys_follow_spare_duplicates_when_it_is_changed_while_running() -> None:
    bench = Bench(engine("a", 1), engine("b", 1), settings=config())
    behind(bench)
    bench.do(Reconfigure(config(queue={"spare_duplicates": False})))
    bench.tick()
    after_reload = key(bench)
    bench.do(ConfigureRun(RUN, RunSettings()))  # puts all in order again
    bench.tick()
    assert after_reload == key(bench), f"after the reload {after_reload}, by the settings in force {key(bench)}"


def test_keys_follow_the_weight_of_prefixes_of_a_phase() -> None:
    """weights.prefix in a file is policy.stable_prefix_weight in the core (server/config.py)."""
    settled = {"cold_start_steps": 0, "phase_ramp_steps": 0}
    bench = Bench(engine("a", 1), engine("b", 1), settings=config(policy=settled))
    bench.step(1)
    behind(bench)
    bench.do(Reconfigure(config(policy={**settled, "stable_prefix_weight": 1.6})))
    bench.tick()
    after_reload = key(bench)
    bench.do(ConfigureRun(RUN, RunSettings()))
    bench.tick()
    assert after_reload == key(bench), f"after the reload {after_reload}, by the settings in force {key(bench)}"


def test_what_waits_is_expected_to_write_as_its_limit_says_when_lengths_are_no_longer_learnt() -> None:
    bench = Bench(engine("a", 1), engine("b", 1), settings=config())
    behind(bench)
    (entry,) = bench.its_run().entries.values()
    learnt = entry.expected_tokens
    bench.do(Reconfigure(config(queue={"learn_lengths": False})))
    bench.tick()
    unknown = LengthModel().expected("any", (entry.task_type, entry.stratum), 16)
    assert entry.expected_tokens == unknown != learnt
    bench.do(Reconfigure(config()))
    bench.tick()
    assert entry.expected_tokens == learnt
