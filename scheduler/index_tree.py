"""The radix forest under the prefix index: structure, engine table, byte accounting, the eviction order.

Each method leaves the invariants of `index.py` in force, except where its docstring says what the caller must do next.
This module knows nothing of policy versions and does not decide what to evict.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from heapq import heappop
from typing import Final

from rolloutd.scheduler.index_base import TOKEN_BYTES, Namespace
from rolloutd.scheduler.index_node import (
    CREDIT_BYTES,
    END_BYTES,
    NAMESPACE_BYTES,
    NO_CHILDREN,
    NODE_BYTES,
    Engine,
    Node,
    Root,
)
from rolloutd.scheduler.index_order import Order

# Distinct masks whose engines are remembered; masks repeat a lot, and decoding one of 48 engines takes 8 us. Deep chains
# that wander over 64 engines have some 10,000; an entry is about 250 bytes.
MAX_CACHED_MASKS: Final = 16_384


class PrefixForest:
    """Trees of all namespaces, with who holds what."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._page_bytes = page_tokens * TOKEN_BYTES
        self._roots: dict[Namespace, Root] = {}
        self._owners: dict[Hashable, dict[Namespace, Root]] = {}
        self._lru = Order()  # every node but roots, dead ones until they are swept
        self._tick = 0  # counts touches
        self._bytes = 0
        self._edge_bytes = 0
        self._engines: dict[str, Engine] = {}
        self._by_bit: list[Engine | None] = []
        self._free_bits: list[int] = []  # heap
        self._live = 0  # bits of present engines
        self._capped = 0  # those of them that have a cap
        self._doomed = 0  # bits of engines that are gone, not cleaned off the trees yet
        self._holders_by_mask: dict[int, tuple[Engine, ...]] = {}
        self.unseated = 0  # engines that lost their bit so far: segments obtained before may name others
        self._every_unit_tokens = page_tokens  # a multiple of what each engine can be credited in; grows, at most

    # ---- engines

    def bit(self, engine: str) -> int | None:
        """Bit number of an engine at present, None if unknown."""
        holder = self._engines.get(engine)
        return None if holder is None else holder.bit

    def flag(self, engine: str) -> int:
        """The engine's bit as a mask, as in `segments`; 0 if unknown."""
        holder = self._engines.get(engine)
        return 0 if holder is None else holder.flag

    def _seat(self, name: str, page_tokens: int, max_tokens: int) -> Engine:
        if self._free_bits:
            bit = heappop(self._free_bits)
        else:
            bit = len(self._by_bit)
            self._by_bit.append(None)
        holder = Engine(name, bit, page_tokens, max_tokens, self.page_tokens)
        self._engines[name] = self._by_bit[bit] = holder
        self._live |= holder.flag
        self._every_unit_tokens = math.lcm(self._every_unit_tokens, holder.unit_tokens)
        if max_tokens:
            self._capped |= holder.flag
        return holder

    def _unseat(self, holder: Engine) -> None:
        del self._engines[holder.name]
        self.unseated += 1
        self._by_bit[holder.bit] = None
        self._live &= ~holder.flag
        self._capped &= ~holder.flag
        self._doomed |= holder.flag
        self._bytes -= END_BYTES * len(holder.ends)
        self._holders_by_mask.clear()

    def _holders(self, live_mask: int) -> tuple[Engine, ...]:
        """Engines of a mask without bits of absent engines; remembered per mask."""
        holders = self._holders_by_mask.get(live_mask)
        if holders is None:
            if len(self._holders_by_mask) >= MAX_CACHED_MASKS:
                self._holders_by_mask.clear()
            found = []
            mask = live_mask
            while mask:
                holder = self._by_bit[(mask & -mask).bit_length() - 1]
                assert holder is not None
                found.append(holder)
                mask &= mask - 1
            holders = self._holders_by_mask[live_mask] = tuple(found)
        return holders

    # ---- structure

    def _plant(self, namespace: Namespace) -> Root:
        root = Root(namespace)
        self._roots[namespace] = root
        self._owners.setdefault(namespace.owner, {})[namespace] = root
        self._bytes += NAMESPACE_BYTES
        return root

    def _uproot(self, root: Root) -> None:
        """Take the tree out of look-up. The caller accounts for its memory (`_root_bytes`) when it goes."""
        del self._roots[root.namespace]
        siblings = self._owners[root.namespace.owner]
        del siblings[root.namespace]
        if not siblings:
            del self._owners[root.namespace.owner]
        root.dead = True

    @staticmethod
    def _root_bytes(root: Root) -> int:
        return NAMESPACE_BYTES + CREDIT_BYTES * len(root.credit_tokens)

    def _grow(self, parent: Node, root: Root, edge: bytes, mask: int) -> Node:
        """A new leaf. The caller touches its path next, so that ancestors come after it in the LRU."""
        leaf = Node(edge, parent, root, mask, self._tick)
        if parent.children is NO_CHILDREN:
            parent.children = {}
        parent.children[edge[: self._page_bytes]] = leaf
        self._lru.add(leaf)
        root.nodes += 1
        self._edge_bytes += len(edge)
        self._bytes += NODE_BYTES + len(edge)
        return leaf

    def _split(self, node: Node, length: int) -> Node:
        """Cut `node` after `length` bytes of its edge; returns the new upper half, which the caller touches next.

        `node` stays the lower half and keeps its place in the LRU: a tail nobody asked for is not refreshed by a fork
        above it. Both halves are copies.
        """
        parent = node.parent
        assert parent is not None
        page = self._page_bytes
        edge = node.edge
        upper = Node(edge[:length], parent, node.root, node.mask & self._live, node.stamp)
        parent.children[edge[:page]] = upper
        node.edge = edge[length:]
        node.parent = upper
        upper.children = {node.edge[:page]: node}
        self._lru.add(upper)
        node.root.nodes += 1
        self._bytes += NODE_BYTES
        return upper

    def _merge(self, upper: Node, lower: Node) -> None:
        """Join a node with its only child; the child lives on under its own place in the LRU.

        `upper` keeps pointing at it, so a running pass that still holds `upper` finds what is below.
        """
        parent = upper.parent
        assert parent is not None
        lower.edge = upper.edge + lower.edge
        lower.parent = parent
        parent.children[lower.edge[: self._page_bytes]] = lower
        upper.parent = None
        upper.edge = b""
        self._lru.remove(upper)
        lower.root.nodes -= 1
        self._bytes -= NODE_BYTES
        for holder in self._holders(upper.ending & self._capped):
            if upper in holder.ends:
                del holder.ends[upper]
                self._bytes -= END_BYTES
                if lower not in holder.ends:
                    holder.ends[lower] = None
                    lower.ending |= holder.flag
                    self._bytes += END_BYTES

    def _merge_if_alike(self, upper: Node) -> None:
        """Join with an only child that the same engines hold and that was touched at the same time.

        Where the stem was touched since without the tail, they stay apart: the tail alone may then be evicted.
        """
        if upper.parent is not None and len(upper.children) == 1:
            (lower,) = upper.children.values()
            if upper.stamp == lower.stamp and not (upper.mask ^ lower.mask) & self._live:
                self._merge(upper, lower)

    def _touch_path(self, node: Node) -> None:
        """Make the path to `node` the most recent, leaf first, and join fragments on it."""
        self._tick = tick = self._tick + 1
        order = self._lru
        lower: Node | None = None
        parent = node.parent
        while parent is not None:
            order.touch(node)
            node.stamp = tick
            if lower is not None and len(node.children) == 1 and not (node.mask ^ lower.mask) & self._live:
                self._merge(node, lower)
            else:
                lower = node
            node = parent
            parent = node.parent

    def _remove(self, leaf: Node) -> None:
        """Take out a leaf, and each ancestor that is left without children and without a present engine."""
        while True:
            parent = leaf.parent
            assert parent is not None and not leaf.children
            root = leaf.root
            held = leaf.mask & self._live
            if held:
                tokens = len(leaf.edge) // TOKEN_BYTES
                credit_tokens = root.credit_tokens
                for holder in self._holders(held):
                    holder.tokens -= tokens
                    credit_tokens[holder.bit] -= tokens
                    if holder.max_tokens:
                        self._end_moves_up(holder, leaf, parent)
            del parent.children[leaf.edge[: self._page_bytes]]
            self._lru.remove(leaf)
            root.nodes -= 1
            self._edge_bytes -= len(leaf.edge)
            self._bytes -= NODE_BYTES + len(leaf.edge)
            leaf.parent = None
            leaf.edge = b""
            if parent.children:
                self._merge_if_alike(parent)
                return
            parent.children = NO_CHILDREN
            if parent is root:
                self._uproot(root)
                self._bytes -= self._root_bytes(root)
                return
            if parent.mask & self._live:
                return
            leaf = parent

    # ---- credit of one engine

    def _uncredit(self, node: Node, holder: Engine) -> None:
        """Take the engine's bit off a node whose children do not have it."""
        tokens = len(node.edge) // TOKEN_BYTES
        node.mask &= ~holder.flag
        holder.tokens -= tokens
        node.root.credit_tokens[holder.bit] -= tokens
        if holder.max_tokens:
            assert node.parent is not None
            self._end_moves_up(holder, node, node.parent)
        if node.mask & self._live:
            self._merge_if_alike(node)
        elif not node.children:
            self._remove(node)

    def _uncredit_subtree(self, node: Node, holder: Engine) -> None:
        doomed = [node]
        for member in doomed:  # grows while it is walked: parents before children
            doomed.extend(child for child in member.children.values() if child.mask & holder.flag)
        for member in reversed(doomed):
            if member.parent is not None:  # else it was joined with its last child, which took its credit along
                self._uncredit(member, holder)

    def _mark_end(self, holder: Engine, node: Node) -> None:
        """The engine's most recent prompt ended at `node`."""
        if node in holder.ends:
            holder.ends.move_to_end(node)
            return
        self._bytes += END_BYTES
        holder.ends[node] = None
        node.ending |= holder.flag

    def _end_moves_up(self, holder: Engine, node: Node, parent: Node) -> None:
        """The engine loses `node`, so its credit may now end at the parent: which is no more recent than all others."""
        ends = holder.ends
        if node in ends:
            del ends[node]
            self._bytes -= END_BYTES
        if parent.parent is not None and parent not in ends:
            ends[parent] = None
            ends.move_to_end(parent, last=False)
            parent.ending |= holder.flag
            self._bytes += END_BYTES

    def _drop_oldest_credit(self, holder: Engine) -> None:
        """One step towards a capped engine's limit: drop its least recent end, or an entry that is not an end."""
        node = next(iter(holder.ends))
        if node.root.dead or any(child.mask & holder.flag for child in node.children.values()):
            del holder.ends[node]
            self._bytes -= END_BYTES
        else:
            self._uncredit(node, holder)
