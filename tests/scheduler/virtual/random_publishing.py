"""A trainer that publishes at random: every mode, from disk or pushed by itself, in order or not, with calls that go wrong.

What this module does not know: what must hold of it (`publications`).
"""

from __future__ import annotations

import random
from collections import Counter

from rolloutd.bench.virtual import Simulation
from rolloutd.bench.virtual_faults import FaultyEngine, Misdeed
from rolloutd.scheduler.actions import Action, PublishEnded, PublishProgress
from rolloutd.scheduler.events import Event, PublishPolicy, WeightsPushed
from rolloutd.scheduler.publishing import SOUND_CACHES
from rolloutd.scheduler.spec import PolicyUpdate
from rolloutd.scheduler.states import CacheHandling, UpdateMode, UpdateState, Verb
from tests.scheduler.virtual.publications import weights_of

# What can go wrong with each call; the others are done and answered.
MISDEEDS: dict[Verb, tuple[Misdeed, ...]] = {
    Verb.PAUSE: (Misdeed.NOT_DONE,),
    Verb.FLUSH: (Misdeed.BUSY,),
    Verb.LOAD: (Misdeed.NOT_DONE, Misdeed.BROKEN_OFF, Misdeed.SLOW),
    Verb.END: (Misdeed.BROKEN_OFF,),
    Verb.VERIFY: (Misdeed.STRANGE,),
}
ANYWHERE = (
    Misdeed.REFUSED,
    Misdeed.ERROR,
    Misdeed.UNREACHED,
    Misdeed.UNHEARD,
    Misdeed.UNANSWERED,
    Misdeed.LATE,
    Misdeed.TWICE,
    Misdeed.CRASH,
    Misdeed.DONE_THEN_CRASH,
)


class RandomPublishing:
    def __init__(
        self,
        rng: random.Random,
        simulation: Simulation,
        engines: list[FaultyEngine],
        runs: list[str],
        counts: Counter[str],
        active: bool,
    ) -> None:
        self.rng = rng
        self.simulation = simulation
        self.engines = {engine.facts.engine_id: engine for engine in engines}
        self.counts = counts
        self.newest: dict[tuple[str, str], int] = {(run, pool): 0 for run in runs for pool in ("policy", "reward")}
        self.wanted = dict.fromkeys(runs, 0)  # the highest version that a rollout of the run asked for
        self.active = active
        self.keeps = rng.random() < 0.3  # whether this world's trainers keep caches
        self.healed = False
        self._waiting: dict[str, tuple[str, int]] = {}  # engine -> run and version that is to be pushed there now
        simulation.observers.append(self.observe)

    def observe(self, event: Event, actions: list[Action]) -> None:
        """Push weights where an engine waits for them, sooner or later, or not at all."""
        for action in actions:
            if isinstance(action, PublishEnded) and self.healed and action.failed:
                self._try_again(action)
            if not isinstance(action, PublishProgress):
                continue
            self._waiting.pop(action.engine_id, None)
            if action.state is UpdateState.PUSHING and action.message:
                self._waiting[action.engine_id] = (action.run_id, action.version)
                delay = 0.0 if self.healed else self.rng.choice([0.0, 0.05, 0.5])
                self.simulation.at(self.simulation.now + delay, lambda one=action: self._push(one))  # type: ignore[misc]

    def publish(self) -> None:
        """One publication, in order or not."""
        rng = self.rng
        run_id, pool = rng.choice([one for one in self.newest if one[1] == "policy" or rng.random() < 0.2])
        newest = self.newest[run_id, pool]
        version = max(0, newest + rng.choice([1, 1, 1, 1, 1, 0, 0, 3, -1]))
        self._send(run_id, pool, version)

    def misdo(self) -> None:
        """Some call to some engine will go wrong."""
        rng = self.rng
        engine = self.engines[rng.choice(sorted(self.engines))]
        verb = rng.choice([*Verb, Verb.LOAD, Verb.LOAD, Verb.PAUSE, Verb.RESUME])
        misdeed = rng.choice([*ANYWHERE, *MISDEEDS.get(verb, ()) * 2])
        engine.misdeeds.setdefault(verb, []).extend([misdeed] * rng.choice([1, 1, 2]))
        self.counts[f"misdeed {misdeed.value}"] += 1

    def heal(self, run_id: str, pool: str) -> None:
        """Publish a version at the end that every engine can get, and that is as high as anybody asked for."""
        self.healed = True
        newest = self.newest[run_id, pool]
        version = max(newest + self.rng.choice([0, 1]), 1, self.wanted[run_id])
        self._send(run_id, pool, version, from_disk=True)

    def _try_again(self, action: PublishEnded) -> None:
        """Something that was wrong before the healing made it fail."""
        if action.version == self.newest[action.run_id, action.pool]:
            self.counts["published again"] += 1
            again = self.simulation.now + 0.1
            self.simulation.at(again, lambda: self._send(action.run_id, action.pool, action.version, from_disk=True))

    def _send(self, run_id: str, pool: str, version: int, from_disk: bool = False) -> None:
        rng = self.rng
        mode = rng.choice(list(UpdateMode))
        cache = rng.choice(SOUND_CACHES[mode])
        if cache is CacheHandling.KEEP and not self.keeps:
            cache = SOUND_CACHES[mode][0]
        if not from_disk and rng.random() < 0.03:
            cache = rng.choice(list(CacheHandling))
        update = PolicyUpdate(
            version=version,
            path=weights_of(run_id, version) if from_disk or rng.random() < 0.6 else "",
            mode=mode,
            cache=cache,
            pool=pool,
            engines_at_once=rng.choice([0, 0, 1, 2]),
        )
        self.newest[run_id, pool] = max(self.newest[run_id, pool], version)
        self.simulation.send(PublishPolicy(run_id, update))

    def _push(self, action: PublishProgress) -> None:
        """The trainer's tensors, and its word for them."""
        rng = self.rng
        if self._waiting.get(action.engine_id) != (action.run_id, action.version):
            return  # it was served with the others, or does not wait any more
        how = "well" if self.healed else rng.choice(["well"] * 6 + ["in part", "not at all", "silently", "all at once"])
        self.counts[f"pushed {how}"] += 1
        error = ""
        if how == "in part":
            engine = self.engines[action.engine_id]
            engine.inner.controls.push_in_part(engine.inner_now(self.simulation.now))
            error = "connection lost"
        elif how == "not at all":
            error = rng.choice(["", "the trainer is out of memory"])
            if not error:
                return
        elif how == "all at once":
            waiting = [one for one, version in self._waiting.items() if version == (action.run_id, action.version)]
            problems = [self._send_tensors(action, engine_id) for engine_id in waiting]
            for engine_id in waiting:
                del self._waiting[engine_id]
            if not any(problems):
                self.simulation.send(WeightsPushed(action.run_id, action.pool, action.version))
            return
        else:
            del self._waiting[action.engine_id]
            error = self._send_tensors(action, action.engine_id)
        if how != "silently":
            self.simulation.send(WeightsPushed(action.run_id, action.pool, action.version, action.engine_id, error))

    def _send_tensors(self, action: PublishProgress, engine_id: str) -> str:
        """With the version as their label, or without any; returns what went wrong."""
        engine = self.engines[engine_id]
        if engine.down or engine.hung:
            return "connection refused"
        label = str(action.version) if self.rng.random() < 0.5 else None
        weights = weights_of(action.run_id, action.version)
        done = engine.inner.controls.push(engine.inner_now(self.simulation.now), label, weights)
        self.simulation.touch(engine)
        return "" if done else "no session is open"
