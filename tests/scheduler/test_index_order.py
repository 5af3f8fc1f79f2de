"""The order of use of the prefix index, driven beside an ordered dict."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from rolloutd.scheduler.index_base import Namespace
from rolloutd.scheduler.index_node import Node, Root
from rolloutd.scheduler.index_order import Order

STEPS = st.lists(st.tuples(st.sampled_from(["add", "touch", "remove"]), st.integers(0, 7)), max_size=60)


@given(STEPS)
def test_it_orders_as_an_ordered_dict_does(steps: list[tuple[str, int]]) -> None:
    root = Root(Namespace("run", "model", "", 0, ""))
    nodes = [Node(bytes([number]), root, root, 0, 0) for number in range(8)]
    order = Order()
    twin: OrderedDict[Node, None] = OrderedDict()
    for step, number in steps:
        node = nodes[number]
        if step == "add" and node not in twin:
            order.add(node)
            twin[node] = None
        elif step == "touch" and node in twin:
            order.touch(node)
            twin.move_to_end(node)
        elif step == "remove" and node in twin:
            order.remove(node)
            del twin[node]
            assert node.earlier is None and node.later is None
        listed = order.listed()
        assert listed == list(twin)
        assert order.count == len(twin)
        assert order.first is (listed[0] if listed else None)
        assert order.last is (listed[-1] if listed else None)
        for earlier, later in zip(listed, listed[1:], strict=False):
            assert later.earlier is earlier
