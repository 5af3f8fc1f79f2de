"""The policy versions of one run in one pool: the newest one, what is being published, who waits for another one.

Invariants
- `version` never goes down; 0 is "as registered".
- At most one publication is `active`; later ones wait in `queue`, in the order of their versions.
- `lookups` names the prefix namespaces that may be matched, each with the engines that may be credited from it: a hit never
  crosses versions, unless the engine's cache was kept over a publication and the run opted in to that.

What this module does not know: how an engine gets its weights.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from rolloutd.scheduler.index_base import Namespace

if TYPE_CHECKING:
    from rolloutd.scheduler.engine import Engine
    from rolloutd.scheduler.entry import Entry
    from rolloutd.scheduler.publication import Publication
    from rolloutd.scheduler.rollout import Rollout
    from rolloutd.scheduler.spec import PolicyUpdate

MAX_QUEUED_PUBLICATIONS: Final = 16
MOST_NAMESPACES: Final = 64


class Lineage:
    __slots__ = (
        "_namespaces",
        "active",
        "held",
        "last",
        "lookups",
        "mark",
        "pool",
        "queue",
        "run_id",
        "undivided",
        "unseen_entries",
        "unseen_rollouts",
        "version",
    )

    def __init__(self, run_id: str, pool: str) -> None:
        self._namespaces: dict[int, Namespace] = {}  # made so far, of some versions
        self.run_id = run_id
        self.pool = pool
        self.version = 0
        self.active: Publication | None = None
        self.queue: deque[PolicyUpdate] = deque()
        self.last: PolicyUpdate | None = None  # the newest: what an engine that comes later needs
        self.held: dict[Entry, None] = {}  # entries that no engine may run with the version it holds
        # Of those that wait, who was not looked at yet after versions changed: see `version_change`.
        self.unseen_entries: dict[Entry, None] = {}
        self.unseen_rollouts: dict[Rollout, None] = {}
        self.undivided = False  # no time slices any more, see `time_slice`
        self.mark = 0  # grows when an engine holds another version, or a version expires
        # (namespace, engines that count by cache key; None: all of them)
        self.lookups: list[tuple[Namespace, frozenset[str] | None]] = [(self.namespace(0), None)]

    @property
    def unseen(self) -> bool:
        """Whether anybody is still to be looked at after a change of version."""
        return bool(self.unseen_entries or self.unseen_rollouts)

    @property
    def owner(self) -> tuple[str, str]:
        """Whose versions count, in the prefix index."""
        return self.run_id, self.pool

    @property
    def newest_asked(self) -> int:
        """The newest version that was accepted, published or still waiting for its turn."""
        return self.queue[-1].version if self.queue else self.version

    def namespace(self, version: int) -> Namespace:
        """Where prefixes stand that weights of this version computed."""
        namespace = self._namespaces.get(version)
        if namespace is None:
            if len(self._namespaces) >= MOST_NAMESPACES:
                self._namespaces.clear()
            namespace = self._namespaces[version] = Namespace(self.owner, "", "", version, "")
        return namespace

    def note_engines(self, engines: list[Engine], ttl_versions: int) -> None:
        """Work out again what may be matched; call when an engine's version changed.

        Only versions that an engine held, and remembers, can have left anything in its cache: their number is bounded, the
        distance between two versions is not.
        """
        self.mark += 1
        creditable: dict[int, set[str]] = {}
        for engine in engines:
            oldest = max(engine.cache_since, engine.version - ttl_versions)
            for version in {version for version in engine.labels.values() if oldest <= version <= engine.version}:
                creditable.setdefault(version, set()).add(engine.cache_key)
        if len(creditable) == 1:
            self.lookups = [(self.namespace(version), None) for version in creditable]
        else:
            self.lookups = [
                (self.namespace(version), frozenset(creditable[version]))
                for version in sorted(creditable, reverse=True)
            ]
        if not self.lookups:
            self.lookups = [(self.namespace(self.version), None)]
