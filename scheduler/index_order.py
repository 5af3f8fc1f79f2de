"""The order in which nodes of the prefix index were last used: a list that runs through the nodes themselves.

Invariants
- From `first` (least recent) to `last` each node is linked once; `earlier` and `later` of neighbours name each other.
- `count` is the number of nodes in it. A node outside has neither neighbour.

What this module does not know: trees. (An ordered dict does the same for 100 bytes more per node, and has to find what the node
can say itself.)
"""

from __future__ import annotations

from rolloutd.scheduler.index_node import Node


class Order:
    __slots__ = ("count", "first", "last")

    def __init__(self) -> None:
        self.first: Node | None = None
        self.last: Node | None = None
        self.count = 0

    def add(self, node: Node) -> None:
        """A new node, as the most recent."""
        self.count += 1
        self._append(node)

    def touch(self, node: Node) -> None:
        """Make a node the most recent."""
        later = node.later
        if later is not None:
            earlier = node.earlier
            later.earlier = earlier
            if earlier is None:
                self.first = later
            else:
                earlier.later = later
            node.later = None
            self._append(node)

    def remove(self, node: Node) -> None:
        earlier, later = node.earlier, node.later
        if earlier is None:
            self.first = later
        else:
            earlier.later = later
        if later is None:
            self.last = earlier
        else:
            later.earlier = earlier
        node.earlier = node.later = None
        self.count -= 1

    def _append(self, node: Node) -> None:
        last = self.last
        node.earlier = last
        if last is None:
            self.first = node
        else:
            last.later = node
        self.last = node

    def listed(self) -> list[Node]:
        """All nodes, least recent first (for checks)."""
        found = []
        node = self.first
        while node is not None:
            found.append(node)
            node = node.later
        return found
