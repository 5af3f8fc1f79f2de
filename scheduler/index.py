"""Policy-versioned prefix index: which engine is believed to hold how much of a prompt in its prefix cache.

One radix tree per namespace; edges are raw token bytes in whole pages; a node carries a bitmask of engines.

Invariants
- An engine's bit on a node means: it holds the whole edge. A live bit on a node is also on all its ancestors.
- The key of a child is the first page of its edge. No edge is empty, and no edge is a view on a larger buffer.
- `max_bytes` holds, by our own accounting, when any call returns. An engine's `max_tokens` holds likewise.
- The first entry of the LRU is a leaf: a path is touched leaf first, then its ancestors. Dead nodes go before live ones.
- Expired namespaces and dropped engines match nothing from the call on; their memory is given back by `sweep`, or by
  inserts that need the room. An engine bit is given out again only after a whole pass has cleaned it off the tree.
- Nothing is claimed that was not inserted. Eviction and caps only make claims smaller.

What it deliberately does not know: time, requests, scores, which engines a caller may use, and what engines really did
(the caller says so with `insert`, `forget`, `clear_engine`). No I/O, not thread-safe. `index_naive.py` is the semantics
in fifty lines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from heapq import heappush
from typing import Final

from rolloutd.scheduler.index_base import TOKEN_BYTES, EngineCacheMirror, IndexStatistics, Namespace
from rolloutd.scheduler.index_check import check_index
from rolloutd.scheduler.index_node import (
    CREDIT_BYTES,
    END_BYTES,
    NAMESPACE_BYTES,
    NO_CHILDREN,
    NODE_BYTES,
    Node,
    Root,
    common_bytes,
)
from rolloutd.scheduler.index_tree import PrefixForest

__all__ = ["EngineCacheMirror", "IndexStatistics", "Namespace", "PrefixIndex"]

EVICTION_POLICIES: Final = ("lru",)
# Nodes of the bit-cleaning pass that an insert visits per node it has to evict: about 30 us, so that orphans of dropped
# engines mostly go before live nodes and yet no insert waits for a whole pass.
PASS_NODES_PER_EVICTION: Final = 32


class PrefixIndex(PrefixForest):
    """See the module. `page_tokens` is the granularity of edges and matches; engines may have other page sizes."""

    def __init__(self, max_bytes: int, page_tokens: int = 16, eviction: str = "lru") -> None:
        """max_bytes: one bound over all engines and owners. Raises ValueError for a value that makes no sense."""
        if max_bytes <= 0:
            raise ValueError(f"max_bytes must be positive, got {max_bytes}")
        if page_tokens <= 0:
            raise ValueError(f"page_tokens must be positive, got {page_tokens}")
        if eviction not in EVICTION_POLICIES:
            raise ValueError(f"eviction must be one of {', '.join(EVICTION_POLICIES)}, got {eviction!r}")
        super().__init__(page_tokens)
        self.max_bytes = max_bytes
        self._floors: dict[Hashable, int] = {}  # owner -> oldest version that may hold credit
        self._pass_mask = 0  # bits that the running pass will free
        self._pass_stack: list[Node] = []  # nodes that it still has to visit; empty when no pass runs
        self._dead_roots: deque[Root] = deque()
        self._dead_stack: list[Node] = []  # nodes of dead trees whose root is gone already
        self._dead_nodes = 0

    # ---- engines

    def add_engine(self, engine: str, page_tokens: int, max_tokens: int = 0) -> int:
        """Make an engine known; returns its bit number, as used in `segments`.

        engine: a name for this incarnation. page_tokens: its own cache page. max_tokens: most tokens ever credited to
        it, 0 for no cap. Raises ValueError if it is known already.
        """
        if engine in self._engines:
            raise ValueError(f"engine {engine!r} is already in the index; drop it first")
        if page_tokens <= 0 or max_tokens < 0:
            raise ValueError(f"engine {engine!r}: page_tokens {page_tokens} must be > 0, max_tokens {max_tokens} >= 0")
        return self._seat(engine, page_tokens, max_tokens).bit

    def drop_engine(self, engine: str) -> bool:
        """The engine is gone, with its cache. O(1) but for freeing the order of a capped one; False if not known."""
        holder = self._engines.get(engine)
        if holder is not None:
            self._unseat(holder)
        return holder is not None

    def clear_engine(self, engine: str) -> int | None:
        """The engine lives on but flushed its cache: all its credit is gone, later inserts count.

        O(1) by giving it a fresh bit. Returns that bit number, or None for an unknown engine. Segments and bit numbers
        obtained before are stale: they name the flushed cache.
        """
        holder = self._engines.get(engine)
        if holder is None:
            return None
        self._unseat(holder)
        return self._seat(engine, holder.page_tokens, holder.max_tokens).bit

    # ---- look-up

    def segments(self, namespace: Namespace, tokens: bytes, touch: bool = True) -> list[tuple[int, int]]:
        """The hot path: [(mask of engines, tokens matched)], longest first.

        Masks grow strictly and lengths shrink strictly down the list, so an engine's match is the first segment that
        has its bit. Bits are those of engines present now. Lengths are whole pages of the index, not yet of the
        engine: `matched` aligns. touch=False leaves the eviction order alone; no other state ever changes here.
        """
        root = self._roots.get(namespace)
        if root is None:
            return []
        live = self._live
        clean = not self._doomed  # then masks have live bits only
        page = self._page_bytes
        node: Node = root
        found: list[tuple[int, int]] = []
        end = last = 0
        while (child := node.children.get(tokens[end : end + page])) is not None:
            mask = child.mask if clean else child.mask & live
            if mask != last:
                if not mask:
                    break
                if last:
                    found.append((last, end // TOKEN_BYTES))
                last = mask
            node = child
            edge = child.edge
            beyond = end + len(edge)
            if tokens[end:beyond] != edge:
                end += common_bytes(edge, tokens, end, min(len(edge), len(tokens) - end), page)
                break
            end = beyond
        if not last:
            return found
        found.append((last, end // TOKEN_BYTES))
        found.reverse()
        if touch:
            self._tick = tick = self._tick + 1
            order = self._lru
            parent = node.parent
            while parent is not None:
                order.touch(node)
                node.stamp = tick
                node = parent
                parent = node.parent
        return found

    def matched(self, segments: list[tuple[int, int]], bit: int) -> int:
        """Tokens that the engine of this bit number holds, in whole pages of both; 0 if none or the engine is gone."""
        holder = self._by_bit[bit] if bit < len(self._by_bit) else None
        if holder is not None:
            for mask, tokens in segments:
                if mask >> bit & 1:
                    return tokens - tokens % holder.unit_tokens
        return 0

    def longest(self, segments: list[tuple[int, int]], most: int) -> list[tuple[str, int]]:
        """(engine, tokens held as `match` counts them) of up to `most` engines, longest first."""
        found: list[tuple[str, int]] = []
        rest = self._live
        for mask, length in segments:
            fresh = mask & rest
            rest ^= fresh
            while fresh:
                if len(found) == most:
                    return found
                holder = self._by_bit[(fresh & -fresh).bit_length() - 1]
                fresh &= fresh - 1
                if holder is not None and (hit := length - length % holder.unit_tokens):
                    found.append((holder.name, hit))
        return found

    def some_of(self, mask: int, most: int, start: int) -> list[str]:
        """Up to `most` engines of a mask, from bit number `start` on and then from the first."""
        found: list[str] = []
        later = mask >> start << start
        for part in (later, mask ^ later):
            while part and len(found) < most:
                holder = self._by_bit[(part & -part).bit_length() - 1]
                part &= part - 1
                if holder is not None:
                    found.append(holder.name)
        return found

    def held(self, segments: list[tuple[int, int]], engine: str) -> int:
        """Tokens that an engine holds, as `match` counts them."""
        holder = self._engines.get(engine)
        if holder is not None:
            flag = holder.flag
            for mask, tokens in segments:
                if mask & flag:
                    return tokens - tokens % holder.unit_tokens
        return 0

    def is_longest(self, segments: list[tuple[int, int]], engine: str) -> bool:
        """Whether no engine has a longer part of the query than this one, whatever part of a page `held` leaves out."""
        holder = self._engines.get(engine)
        return holder is not None and bool(segments) and segments[0][0] & holder.flag != 0

    def hits_on(self, segments: list[tuple[int, int]], engines: int) -> dict[str, int]:
        """{engine: tokens held} among the engines whose bits are in `engines`, as `match` counts them, longest first.

        The work is in proportion to the engines asked for, not to those hit: a mask of the engines with a free slot
        costs a fraction of `match`. Bits of engines that are gone are passed over.
        """
        hits = {}
        rest = engines & self._live
        for mask, length in segments:
            fresh = mask & rest
            if not fresh:
                continue
            if length % self._every_unit_tokens:
                for holder in self._holders(fresh):
                    hit = length - length % holder.unit_tokens
                    if hit:
                        hits[holder.name] = hit
            else:
                for holder in self._holders(fresh):
                    hits[holder.name] = length
            rest ^= fresh
            if not rest:
                break
        return hits

    def match(self, namespace: Namespace, tokens: bytes, touch: bool = True) -> dict[str, int]:
        """{engine: tokens held}, in whole pages of both the index and the engine; engines without a hit are left out."""
        return self.hits_on(self.segments(namespace, tokens, touch), self._live)

    def credited_tokens(self, namespace: Namespace, engine: str) -> int:
        """Tokens credited to the engine in one namespace; 0 where either is unknown."""
        root = self._roots.get(namespace)
        holder = self._engines.get(engine)
        return 0 if root is None or holder is None else root.credit_tokens.get(holder.bit, 0)

    def whole_pages(self, engine: str, tokens: int) -> int:
        """Of so many tokens, those in whole pages of both the index and the engine; 0 for an unknown engine."""
        holder = self._engines.get(engine)
        return 0 if holder is None else tokens - tokens % holder.unit_tokens

    # ---- credit

    def insert(self, namespace: Namespace, tokens: bytes, engine: str) -> int:
        """The engine holds (or is about to hold) this prompt. Returns pages newly credited to it, before eviction.

        Whole pages of both are credited. Ignored, with 0: an unknown engine, a version that has expired. A prompt that
        alone exceeds `max_bytes` or the engine's cap is cut. Raises ValueError for a ragged `tokens`.
        """
        if len(tokens) % TOKEN_BYTES:
            raise ValueError(f"tokens must be whole little-endian uint32 ids, got {len(tokens)} bytes")
        holder = self._engines.get(engine)
        if holder is None or namespace.version < self._floors.get(namespace.owner, namespace.version):
            return 0
        size = min(len(tokens), self.max_bytes - NODE_BYTES - NAMESPACE_BYTES - CREDIT_BYTES - END_BYTES)
        if holder.max_tokens:
            size = min(size, holder.max_tokens * TOKEN_BYTES)
        size -= size % holder.unit_bytes
        if size <= 0:
            return 0
        root = self._roots.get(namespace) or self._plant(namespace)
        node, fresh = self._credit_path(root, tokens, size, holder.flag)
        if fresh:
            if holder.bit not in root.credit_tokens:
                root.credit_tokens[holder.bit] = 0
                self._bytes += CREDIT_BYTES
            root.credit_tokens[holder.bit] += fresh // TOKEN_BYTES
            holder.tokens += fresh // TOKEN_BYTES
        self._touch_path(node)
        if holder.max_tokens:
            self._mark_end(holder, node)
            while holder.tokens > holder.max_tokens:
                self._drop_oldest_credit(holder)
        if self._bytes > self.max_bytes:
            self._make_room()
        return fresh // self._page_bytes

    def _credit_path(self, root: Root, tokens: bytes, size: int, flag: int) -> tuple[Node, int]:
        """Put the bit on the path of `tokens[:size]`; returns its deepest node and the bytes that had no such bit."""
        page = self._page_bytes
        node: Node = root
        start = fresh = 0
        while start < size:
            child = node.children.get(tokens[start : start + page])
            if child is None:
                return self._grow(node, root, tokens[start:size], flag), fresh + size - start
            length = len(child.edge)
            rest = size - start
            if length > rest or tokens[start : start + length] != child.edge:
                length = common_bytes(child.edge, tokens, start, min(length, rest), page)
                if length == rest and child.mask & flag:
                    return child, fresh  # ends inside an edge that the engine holds: nothing to split off
                child = self._split(child, length)
            if not child.mask & flag:
                child.mask |= flag
                fresh += length
            start += length
            node = child
        return node, fresh

    def forget(self, namespace: Namespace, tokens: bytes, engine: str, keep_tokens: int) -> None:
        """The engine reported that of this prompt it holds only `keep_tokens`: drop its credit beyond them.

        Everything of this engine that shares more than `keep_tokens` (in whole pages of both) with `tokens` is cut to
        that length, branches further down too: a cache cannot hold a suffix without its prefix. What is kept counts as
        used just now. The work is in proportion to the branches under the cut.
        """
        holder = self._engines.get(engine)
        root = self._roots.get(namespace)
        if holder is None or root is None:
            return
        keep = keep_tokens // holder.unit_tokens * holder.unit_bytes
        page = self._page_bytes
        start = 0
        node = root.children.get(tokens[:page])
        while node is not None and node.mask & holder.flag:
            edge = node.edge
            whole = tokens[start : start + len(edge)] == edge
            end = start + (
                len(edge) if whole else common_bytes(edge, tokens, start, min(len(edge), len(tokens) - start), page)
            )
            if end > keep:
                stem = self._split(node, keep - start) if keep > start else node.parent
                if stem is not None and stem is not root:
                    self._touch_path(stem)
                    if holder.max_tokens:
                        self._mark_end(holder, stem)
                self._uncredit_subtree(node, holder)
                return
            if not whole:
                return
            start = end
            node = node.children.get(tokens[start : start + page])

    # ---- expiry

    def advance_version(self, owner: Hashable, version: int, ttl_versions: int = 0) -> int:
        """Namespaces of `owner` older than `version - ttl_versions` match nothing from now on; returns how many.

        Later inserts under such a version are ignored. The threshold never moves back; `drop_owner` forgets it. O(1)
        per namespace (a subtraction per engine in it).
        """
        if ttl_versions < 0:
            raise ValueError(f"ttl_versions must be >= 0, got {ttl_versions}")
        floor = max(version - ttl_versions, self._floors.get(owner, version - ttl_versions))
        self._floors[owner] = floor
        expired = [root for namespace, root in self._owners.get(owner, {}).items() if namespace.version < floor]
        for root in expired:
            self._bury(root)
        return len(expired)

    def drop_owner(self, owner: Hashable) -> int:
        """All namespaces of `owner` match nothing from now on; returns how many. The name may be used afresh."""
        self._floors.pop(owner, None)
        roots = list(self._owners.get(owner, {}).values())
        for root in roots:
            self._bury(root)
        return len(roots)

    def _bury(self, root: Root) -> None:
        self._uproot(root)
        for bit, tokens in root.credit_tokens.items():
            holder = self._by_bit[bit]
            if holder is not None:  # else gone and not swept: a bit is not given out again before
                holder.tokens -= tokens
        self._dead_nodes += root.nodes
        self._dead_roots.append(root)

    # ---- giving memory back

    def sweep(self, max_steps: int) -> int:
        """Clean up, dead namespaces first, in about `max_steps` steps; returns the steps done, 0 when all is clean.

        A step is a node, or a node's entry in the order of one capped engine, so that the time of a step is bounded
        whatever the number of engines. The last node may take the sum over `max_steps` by its entries.
        """
        steps = 0
        while steps < max_steps and (done := self._free_dead_node() or self._clean_node()):
            steps += done
        return steps

    def _make_room(self) -> None:
        """Hold the bound: dead nodes, then what a bounded piece of the pass finds, then the least recent leaves."""
        while self._bytes > self.max_bytes:
            if (self._dead_roots or self._dead_stack) and self._free_dead_node():
                continue
            if self._doomed:
                for _ in range(PASS_NODES_PER_EVICTION):
                    if not self._clean_node():
                        break
            if self._bytes > self.max_bytes:
                oldest = self._lru.first
                assert oldest is not None, "memory is counted that nothing holds"
                self._remove(oldest)

    def set_max_bytes(self, max_bytes: int) -> None:
        """Another bound from now on: somebody else needs, or gives back, a part of it. Raises ValueError for none."""
        if max_bytes <= 0:
            raise ValueError(f"max_bytes must be positive, got {max_bytes}")
        self.max_bytes = max_bytes
        if self._bytes > max_bytes:
            self._make_room()

    def evict(self, max_nodes: int) -> int:
        """Give up to `max_nodes` nodes back: dead ones, then the least recently used ends. Returns how many there were.

        Where an end goes, stems that nobody holds any more go with it, uncounted.
        """
        evicted = 0
        while evicted < max_nodes and self._lru.count:
            oldest = self._lru.first
            if not self._free_dead_node() and oldest is not None:
                self._remove(oldest)
            evicted += 1
        return evicted

    def _free_dead_node(self) -> int:
        """Free one node of a dead tree (or its root); returns the steps that took, 0 when there is none."""
        if self._dead_stack:
            node = self._dead_stack.pop()
            self._dead_stack.extend(node.children.values())
            steps = 1
            ending = node.ending & self._capped
            if ending:
                for holder in self._holders(ending):
                    steps += 1
                    if node in holder.ends:
                        del holder.ends[node]
                        self._bytes -= END_BYTES
            self._lru.remove(node)
            self._dead_nodes -= 1
            self._edge_bytes -= len(node.edge)
            self._bytes -= NODE_BYTES + len(node.edge)
            node.edge = b""
            node.parent = None
            node.children = NO_CHILDREN
            return steps
        if self._dead_roots:
            root = self._dead_roots.popleft()
            self._dead_stack.extend(root.children.values())
            self._bytes -= self._root_bytes(root)
            root.children = NO_CHILDREN
            return 1
        return 0

    def _clean_node(self) -> int:
        """One visit of the pass that takes bits of absent engines off the trees; 0 when no pass is due, else 1.

        A pass visits every node that existed when it began, top down, without pruning: nodes made meanwhile are clean,
        and a node that was split or joined meanwhile is still reached, through itself or through what it points to.
        """
        if not self._pass_stack:
            if not self._doomed:
                return 0
            self._pass_mask = self._doomed
            self._pass_stack.extend(self._roots.values())
        if self._pass_stack:
            self._visit(self._pass_stack.pop())
        if not self._pass_stack:
            for bit in range(self._pass_mask.bit_length()):
                if self._pass_mask >> bit & 1:
                    heappush(self._free_bits, bit)
            self._doomed &= ~self._pass_mask
            self._pass_mask = 0
        return 1

    def _visit(self, node: Node) -> None:
        if node.root.dead:
            return
        self._pass_stack.extend(node.children.values())
        if isinstance(node, Root):
            for bit in [bit for bit in node.credit_tokens if not self._live >> bit & 1]:
                del node.credit_tokens[bit]
                self._bytes -= CREDIT_BYTES
        elif node.parent is not None:
            node.mask &= self._live
            node.ending &= self._live
            if node.children:
                self._merge_if_alike(node)
            elif not node.mask:
                self._remove(node)

    # ---- insight

    def statistics(self) -> IndexStatistics:
        """A snapshot, in time proportional to the number of engines."""
        return IndexStatistics(
            nodes=self._lru.count - self._dead_nodes,
            pages=self._edge_bytes // self._page_bytes,
            bytes=self._bytes,
            max_bytes=self.max_bytes,
            namespaces=len(self._roots),
            dead_nodes=self._dead_nodes,
            unswept_bits=self._doomed.bit_count(),
            engine_tokens={name: holder.tokens for name, holder in self._engines.items()},
        )

    def check(self) -> None:
        """Re-derive every counter and link from the trees; AssertionError with details where one is off. O(size)."""
        check_index(self)
