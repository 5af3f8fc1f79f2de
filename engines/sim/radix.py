"""The simulated engine's prefix cache: a page-aligned radix tree over token bytes with locks and LRU eviction.

Invariants
- Keys and edges are whole pages. A node's pages are held once, however many sequences use them.
- A locked node has only locked ancestors; locked nodes are never evicted.
- `_lru` holds exactly the unlocked nodes; whenever a node is touched its ancestors are touched after it, so the first
  entry is always a leaf and eviction needs no scan.
- `cached_pages` = locked pages + `evictable_pages`.

What this module does not know: capacity, requests, time. The order of calls is the only clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator

from rolloutd.engines.sim.kv_log import CacheLog

TOKEN_BYTES = 4


class Node:
    """One edge of the tree with the node below it. `edge` is whole pages of uint32 LE token ids.

    hashes: names of its pages, where the cache has a log.
    """

    __slots__ = ("children", "edge", "hashes", "locks", "parent")

    def __init__(self, edge: bytes, parent: Node | None) -> None:
        self.edge = edge
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.hashes: tuple[int, ...] = ()


class RadixCache:
    """Prefix cache of one engine. Sizes are in pages of `page_tokens` tokens. `log` is told what comes and goes."""

    def __init__(self, page_tokens: int, log: CacheLog | None = None) -> None:
        self.page_tokens = page_tokens
        self._log = log
        self._page_bytes = page_tokens * TOKEN_BYTES
        self._roots: dict[Hashable, Node] = {}
        self._namespace_of: dict[int, Hashable] = {}  # id(root) -> namespace, for dropping empty ones
        self._lru: OrderedDict[Node, None] = OrderedDict()
        self.cached_pages = 0
        self.evictable_pages = 0

    def match(self, namespace: Hashable, tokens: bytes, limit_tokens: int) -> tuple[Node | None, int]:
        """Deepest node whose whole path is a prefix of `tokens`, and its depth in pages; never beyond `limit_tokens`.

        Splits a partly matched edge; counts as use of the path.
        """
        root = self._roots.get(namespace)
        if root is None:
            return None, 0
        end = min(limit_tokens * TOKEN_BYTES, len(tokens)) // self._page_bytes * self._page_bytes
        node, position = self._walk(root, tokens, end)
        self._touch(node)
        return node, position // self._page_bytes

    def peek_pages(self, namespace: Hashable, tokens: bytes, limit_tokens: int) -> int:
        """Pages that `match` would find; changes nothing."""
        node = self._roots.get(namespace)
        end = min(limit_tokens * TOKEN_BYTES, len(tokens)) // self._page_bytes * self._page_bytes
        position = 0
        while node is not None and position < end:
            child = node.children.get(tokens[position : position + self._page_bytes])
            if child is None:
                break
            common = self._common_bytes(child.edge, tokens, position, end)
            position += common
            if common < len(child.edge):
                break
            node = child
        return position // self._page_bytes

    def insert(self, namespace: Hashable, tokens: bytes) -> tuple[Node | None, int]:
        """Hold the whole pages of `tokens`; returns the end node and how many of its pages were there before."""
        end = len(tokens) // self._page_bytes * self._page_bytes
        if end == 0:
            return None, 0
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(b"", None)
            self._namespace_of[id(root)] = namespace
        node, position = self._walk(root, tokens, end)
        known = position // self._page_bytes
        if position < end:
            child = Node(tokens[position:end], node)
            node.children[child.edge[: self._page_bytes]] = child
            pages = len(child.edge) // self._page_bytes
            self.cached_pages += pages
            self.evictable_pages += pages
            self._lru[child] = None
            if self._log is not None:
                last = node.hashes[-1] if node.hashes else None
                child.hashes = self._log.stored(namespace, last, child.edge)
            node = child
        self._touch(node)
        return node, known

    def lock(self, node: Node | None) -> None:
        """Protect a node and its path from eviction, once per call."""
        while node is not None and node.parent is not None:
            if node.locks == 0:
                del self._lru[node]
                self.evictable_pages -= len(node.edge) // self._page_bytes
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node | None) -> None:
        """Take back one `lock` of the node's path."""
        while node is not None and node.parent is not None:
            node.locks -= 1
            if node.locks == 0:
                self._lru[node] = None
                self.evictable_pages += len(node.edge) // self._page_bytes
            node = node.parent

    def evict(self, pages: int) -> int:
        """Drop least recently used leaves until at least `pages` are free; returns how many were (0 if none are left)."""
        freed = 0
        while freed < pages and self._lru:
            node, _ = self._lru.popitem(last=False)
            assert not node.children and node.parent is not None
            count = len(node.edge) // self._page_bytes
            freed += count
            self.cached_pages -= count
            self.evictable_pages -= count
            parent = node.parent
            if self._log is not None:
                self._log.removed(node.hashes)
            del parent.children[node.edge[: self._page_bytes]]
            if parent.parent is None and not parent.children:
                del self._roots[self._namespace_of.pop(id(parent))]
        return freed

    def clear(self) -> None:
        """Forget everything. Nothing may be locked."""
        if self.evictable_pages != self.cached_pages:
            raise ValueError("clear: pages are in use")
        self._roots.clear()
        self._namespace_of.clear()
        self._lru.clear()
        self.cached_pages = self.evictable_pages = 0
        if self._log is not None:
            self._log.cleared()

    def check(self) -> None:
        """Re-derive every counter from the nodes; raises AssertionError where one is off."""
        nodes = list(self._nodes())
        pages = [len(node.edge) // self._page_bytes for node in nodes]
        assert sum(pages) == self.cached_pages
        assert sum(p for p, n in zip(pages, nodes, strict=True) if n.locks == 0) == self.evictable_pages
        assert {n for n in nodes if n.locks == 0} == set(self._lru)
        for node in nodes:
            assert node.edge and len(node.edge) % self._page_bytes == 0
            assert all(child.locks <= node.locks for child in node.children.values())

    def _nodes(self) -> Iterator[Node]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _walk(self, node: Node, tokens: bytes, end: int) -> tuple[Node, int]:
        position = 0
        while position < end:
            child = node.children.get(tokens[position : position + self._page_bytes])
            if child is None:
                break
            common = self._common_bytes(child.edge, tokens, position, end)
            position += common
            if common < len(child.edge):
                return self._split(child, common), position
            node = child
        return node, position

    def _common_bytes(self, edge: bytes, tokens: bytes, position: int, end: int) -> int:
        if len(edge) <= end - position and tokens.startswith(edge, position):
            return len(edge)
        low, high = 1, min(len(edge), end - position) // self._page_bytes  # the first page is known to match
        while low < high:
            middle = (low + high + 1) // 2
            if tokens.startswith(edge[: middle * self._page_bytes], position):
                low = middle
            else:
                high = middle - 1
        return low * self._page_bytes

    def _split(self, node: Node, position: int) -> Node:
        parent = node.parent
        assert parent is not None
        upper = Node(node.edge[:position], parent)
        upper.locks = node.locks
        upper.children[node.edge[position : position + self._page_bytes]] = node
        parent.children[upper.edge[: self._page_bytes]] = upper
        node.edge = node.edge[position:]
        pages = position // self._page_bytes
        upper.hashes, node.hashes = node.hashes[:pages], node.hashes[pages:]
        node.parent = upper
        if upper.locks == 0:
            self._lru[upper] = None  # behind its child; the caller touches the path from here up
        return upper

    def _touch(self, node: Node | None) -> None:
        while node is not None and node.parent is not None:
            if node.locks == 0:
                self._lru.move_to_end(node)
            node = node.parent
