"""The parts of the radix tree: nodes, namespace roots, engines, and what each costs in memory.

Invariants are listed in `index.py`, which owns every mutation. This module knows nothing of eviction or versions.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final

from mypy_extensions import mypyc_attr

from rolloutd.scheduler.index_base import TOKEN_BYTES, Namespace

# Memory beside the tokens themselves, measured with tracemalloc on CPython 3.11 (`test_accounting_follows_tracemalloc`).
NODE_BYTES: Final = 440  # node, its place in the LRU, its key and entry in the parent, headers, half a dict of children
NAMESPACE_BYTES: Final = 550  # root, its dicts, the tuple and its entry
CREDIT_BYTES: Final = 60  # one (namespace, engine) counter
END_BYTES: Final = 90  # one entry in the order of a capped engine

# Shared by all leaves: most nodes are leaves, and an empty dict of their own is 64 bytes. Never written to.
NO_CHILDREN: Final[dict[bytes, Node]] = {}


@mypyc_attr(acyclic=True)
class Node:
    """One edge of the tree, held as a whole by each engine whose bit is in `mask`."""

    __slots__ = ("children", "earlier", "edge", "ending", "later", "mask", "parent", "root", "stamp")

    def __init__(self, edge: bytes, parent: Node | None, root: Root, mask: int, stamp: int) -> None:
        self.edge = edge  # whole pages of token bytes; never a view on a larger buffer
        self.children = NO_CHILDREN  # first page of the child's edge -> child
        self.parent = parent  # None for a root and for a node that was taken out
        self.root = root  # a root is its own
        self.mask = mask  # may still carry bits of dropped engines; always read through the live mask
        self.stamp = stamp  # tick of the last touch
        self.earlier: Node | None = None  # neighbours in the order of use, see `index_order.py`
        self.later: Node | None = None
        self.ending = 0  # bits of capped engines that may have the node in `ends`: far fewer than hold it


class Root(Node):
    """The empty stem of one namespace."""

    __slots__ = ("credit_tokens", "dead", "namespace", "nodes")

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(b"", None, self, 0, 0)
        self.namespace = namespace
        self.nodes = 0  # without itself
        self.credit_tokens: dict[int, int] = {}  # engine bit -> tokens; bits of dropped engines linger until swept
        self.dead = False  # expired or emptied: not in look-up any more


class Engine:
    """One incarnation of an engine, under one bit."""

    __slots__ = ("bit", "ends", "flag", "max_tokens", "name", "page_tokens", "tokens", "unit_bytes", "unit_tokens")

    def __init__(self, name: str, bit: int, page_tokens: int, max_tokens: int, index_page_tokens: int) -> None:
        self.name = name
        self.bit = bit
        self.flag = 1 << bit
        self.page_tokens = page_tokens
        self.unit_tokens = math.lcm(page_tokens, index_page_tokens)  # what can be credited is a multiple of both pages
        self.unit_bytes = self.unit_tokens * TOKEN_BYTES
        self.max_tokens = max_tokens  # 0: no cap
        self.tokens = 0  # credited in live namespaces
        # Only for a capped engine: where its inserts ended, least recent first. Every node that has its bit and no
        # child with its bit is here; a node with such a child may be, and is passed over.
        self.ends: OrderedDict[Node, None] = OrderedDict()


def common_bytes(edge: bytes, tokens: bytes, start: int, limit: int, page_bytes: int) -> int:
    """Length of the common prefix of `edge` and `tokens[start:start + limit]` in whole pages.

    The first page is known to be equal, the whole of `edge` not to be.
    """
    whole = limit - limit % page_bytes
    # Slices are compared and not `startswith` asked: compiled, that call costs more than the copy.
    if whole < len(edge) and tokens[start : start + whole] == edge[:whole]:
        return whole  # most often `tokens` just ends inside the edge
    low, high = 1, whole // page_bytes - 1
    while low < high:
        middle = (low + high + 1) // 2
        begin, end = low * page_bytes, middle * page_bytes
        if tokens[start + begin : start + end] == edge[begin:end]:
            low = middle
        else:
            high = middle - 1
    return low * page_bytes
