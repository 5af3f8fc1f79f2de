"""The integrity check of the prefix index: every counter, link and order derived anew from the trees."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rolloutd.scheduler.index_base import TOKEN_BYTES
from rolloutd.scheduler.index_node import CREDIT_BYTES, END_BYTES, NAMESPACE_BYTES, NO_CHILDREN, NODE_BYTES, Node, Root

if TYPE_CHECKING:
    from rolloutd.scheduler.index import PrefixIndex


def check_index(index: PrefixIndex) -> None:
    """Raises AssertionError naming what differs. Time and memory in proportion to the index."""
    page = index._page_bytes
    assert not NO_CHILDREN, "the shared empty dict of leaves was written to"
    _check_bits(index)
    places = {node: place for place, node in enumerate(index._lru.listed())}
    assert len(places) == index._lru.count, f"LRU counts {index._lru.count} nodes, and has {len(places)}"
    seen: set[Node] = set()
    edge_bytes = total_bytes = 0
    engine_tokens: Counter[str] = Counter()

    for namespace, root in index._roots.items():
        assert root.namespace == namespace and root.parent is None and root.root is root and not root.dead, namespace
        assert index._owners[namespace.owner][namespace] is root, f"{namespace} is not under its owner"
        assert root.children, f"{namespace} is empty but was not taken out"
        assert namespace.version >= index._floors.get(namespace.owner, namespace.version), f"{namespace} has expired"
        members = _members(root)
        assert root.nodes == len(members), f"{namespace}: {root.nodes} nodes counted, {len(members)} found"
        credit: Counter[int] = Counter()
        for node in members:
            _check_node(index, root, node, places, page)
            for holder in index._holders(node.mask & index._live):
                credit[holder.bit] += len(node.edge) // TOKEN_BYTES
                engine_tokens[holder.name] += len(node.edge) // TOKEN_BYTES
        counted = {bit: n for bit, n in root.credit_tokens.items() if n and index._live >> bit & 1}
        assert counted == dict(credit), f"{namespace}: credit {counted} counted, {dict(credit)} found"
        for bit in root.credit_tokens:
            assert (index._live | index._doomed) >> bit & 1, f"{namespace}: credit under free bit {bit}"
        seen.update(members)
        edge_bytes += sum(len(node.edge) for node in members)
        total_bytes += NAMESPACE_BYTES + CREDIT_BYTES * len(root.credit_tokens)
    assert sum(len(roots) for roots in index._owners.values()) == len(index._roots), "owners and namespaces disagree"

    dead = [node for root in index._dead_roots for node in _members(root)]
    dead += [node for top in index._dead_stack for node in [top, *_members(top)]]
    assert all(node.root.dead for node in dead), "a live node is on the dead list"
    assert index._dead_nodes == len(dead), f"{index._dead_nodes} dead nodes counted, {len(dead)} found"
    seen.update(dead)
    edge_bytes += sum(len(node.edge) for node in dead)
    total_bytes += sum(NAMESPACE_BYTES + CREDIT_BYTES * len(root.credit_tokens) for root in index._dead_roots)

    assert seen == places.keys(), f"LRU has {len(places)} nodes, trees have {len(seen)}"
    assert index._edge_bytes == edge_bytes, f"{index._edge_bytes} edge bytes counted, {edge_bytes} found"
    total_bytes += edge_bytes + NODE_BYTES * len(seen)
    for name, holder in index._engines.items():
        assert holder.tokens == engine_tokens[name], (
            f"{name}: {holder.tokens} tokens counted, {engine_tokens[name]} found"
        )
        assert not holder.max_tokens or holder.tokens <= holder.max_tokens, (
            f"{name}: {holder.tokens} tokens, over its cap"
        )
        assert holder.max_tokens or not holder.ends, f"{name} has no cap but an order"
        assert seen >= holder.ends.keys(), f"{name}: its order names nodes that are gone"
        assert all(node.ending & holder.flag for node in holder.ends), f"{name}: nodes that do not know of its order"
        total_bytes += END_BYTES * len(holder.ends)
    assert index._bytes == total_bytes, f"{index._bytes} bytes counted, {total_bytes} found"
    assert index._bytes <= index.max_bytes, f"{index._bytes} bytes, bound {index.max_bytes}"


def _check_bits(index: PrefixIndex) -> None:
    free = sum(1 << bit for bit in index._free_bits)
    assert index._live == sum(holder.flag for holder in index._engines.values()), "live mask and engines disagree"
    assert index._capped == sum(holder.flag for holder in index._engines.values() if holder.max_tokens), "capped mask"
    assert free + index._live + index._doomed == (1 << len(index._by_bit)) - 1, (
        "bits are not live, doomed or free once each"
    )
    assert index._pass_mask & ~index._doomed == 0, "the pass would free a bit that is not doomed"
    assert bool(index._pass_mask) == bool(index._pass_stack), "a pass runs without bits, or bits without a pass"
    for bit, holder in enumerate(index._by_bit):
        assert (holder is not None) == bool(index._live >> bit & 1), f"bit {bit}"
        assert holder is None or (holder.bit == bit and index._engines[holder.name] is holder), f"bit {bit}"


def _check_node(index: PrefixIndex, root: Root, node: Node, places: dict[Node, int], page: int) -> None:
    parent = node.parent
    where = f"{root.namespace} node of {len(node.edge)} bytes"
    assert parent is not None and node.root is root, f"{where}: cut off"
    assert node.edge and len(node.edge) % page == 0, f"{where}: edge is not whole pages"
    assert parent.children.get(node.edge[:page]) is node, f"{where}: not under its first page"
    assert bool(node.children) == (node.children is not NO_CHILDREN), f"{where}: an empty dict of its own"
    assert node.mask & ~(index._live | index._doomed) == 0, f"{where}: carries a free bit, mask {node.mask:b}"
    live = node.mask & index._live
    assert live or index._doomed, f"{where}: nobody holds it and nothing is left to sweep"
    if parent is not root:
        assert live & ~parent.mask == 0, f"{where}: held by engines that do not hold its parent"
        assert places[node] < places[parent], f"{where}: its parent would be evicted first"
        assert node.stamp <= parent.stamp, f"{where}: touched after its parent"
    for holder in index._holders(live & index._capped):
        ends_here = not any(child.mask & holder.flag for child in node.children.values())
        assert not ends_here or node in holder.ends, f"{where}: an end of {holder.name} that its cap cannot see"


def _members(top: Node) -> list[Node]:
    """All nodes below `top`."""
    members = list(top.children.values())
    for node in members:
        members.extend(node.children.values())
    return members
