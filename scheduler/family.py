"""Which rollout was submitted under which parent (tree search): cancelling one cancels its subtree.

Invariants
- An id is remembered while it, or something below it, is still a record of the run; then it is forgotten. So a subtree can be
  cancelled by the name of a root that was delivered and acknowledged long ago.

What this module does not know: rollouts; it keeps ids.
"""

from __future__ import annotations

from collections.abc import Container


class Family:
    __slots__ = ("_children", "_parent")

    def __init__(self) -> None:
        self._children: dict[str, dict[str, None]] = {}  # insertion-ordered
        self._parent: dict[str, str] = {}

    def add(self, parent: str, child: str) -> None:
        self._children.setdefault(parent, {})[child] = None
        self._parent[child] = parent

    def subtree(self, root: str) -> list[str]:
        """`root` and all below it, parents before children."""
        found = {root: None}
        waiting = [root]
        for member in waiting:  # grows while it is walked
            below = [child for child in self._children.get(member, ()) if child not in found]
            found.update(dict.fromkeys(below))
            waiting.extend(below)
        return waiting

    def forget(self, rollout_id: str, records: Container[str]) -> None:
        """A record is gone: forget it, and those above it that are gone too, as far as nothing below is left."""
        while rollout_id not in records and rollout_id not in self._children:
            parent = self._parent.pop(rollout_id, None)
            if parent is None:
                return
            siblings = self._children[parent]
            del siblings[rollout_id]
            if siblings:
                return
            del self._children[parent]
            rollout_id = parent

    def __len__(self) -> int:
        return len(self._parent)
