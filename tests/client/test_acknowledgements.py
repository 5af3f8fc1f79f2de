"""The watermark against a naive server, over random histories with broken streams."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from rolloutd import v1
from rolloutd.client.acknowledgements import Acknowledgements


class History(RuleBasedStateMachine):
    """A server that keeps results until acknowledged, a stream that may lose what was sent last, and a caller."""

    results = Bundle("results")

    def __init__(self) -> None:
        super().__init__()
        self.client = Acknowledgements()
        self.kept: dict[str, int] = {}  # at the server: rollout to cursor
        self.verdicts_seen: dict[str, float] = {}
        self.sent: list[tuple[list[v1.Acknowledgement], int]] = []  # on this stream, perhaps not applied yet
        self.open: set[str] = set()  # the caller has not dealt with these
        self.verdicts_given: dict[str, float] = {}
        self.cursor = 0

    @rule(target=results)
    def result_arrives(self) -> str:
        self.cursor += 1
        rollout_id = f"x{self.cursor}"
        self.kept[rollout_id] = self.cursor
        self.open.add(rollout_id)
        self.client.arrived(self.cursor, rollout_id)
        return rollout_id

    @rule()
    def group_ends(self) -> None:
        self.cursor += 1
        self.client.passed(self.cursor)

    @rule(rollout_id=results)
    def result_arrives_again_under_a_new_cursor(self, rollout_id: str) -> None:
        if rollout_id in self.open:
            self.cursor += 1
            self.kept[rollout_id] = self.cursor
            self.client.arrived(self.cursor, rollout_id)

    @rule(rollout_id=results, reward=st.none() | st.floats(-1, 1))
    def caller_deals_with(self, rollout_id: str, reward: float | None) -> None:
        if rollout_id in self.open:
            self.open.discard(rollout_id)
            if reward is not None:
                self.verdicts_given[rollout_id] = reward
            self.client.acknowledge(v1.Acknowledgement(rollout_id=rollout_id, reward=reward))

    @rule(limit=st.integers(0, 3))
    def client_sends(self, limit: int) -> None:
        self.sent.append(self.client.take(limit))

    @rule(applied=st.integers(0, 5))
    def server_reads(self, applied: int) -> None:
        for messages, through in self.sent[:applied]:
            self._apply(messages, through)
        del self.sent[:applied]

    @rule()
    def stream_breaks(self) -> None:
        self.sent.clear()
        self._forget(self.client.resume_cursor)
        self.client.reattached(self.cursor)

    def _apply(self, messages: list[v1.Acknowledgement], through: int) -> None:
        for message in messages:
            if self.kept.pop(message.rollout_id, None) is not None and message.HasField("reward"):
                self.verdicts_seen[message.rollout_id] = message.reward
        self._forget(through)

    def _forget(self, through: int) -> None:
        for rollout_id in [rollout_id for rollout_id, cursor in self.kept.items() if cursor <= through]:
            del self.kept[rollout_id]

    @invariant()
    def server_keeps_what_the_caller_still_needs(self) -> None:
        assert self.open <= self.kept.keys()

    def teardown(self) -> None:
        self.server_reads(len(self.sent))
        while self.client.pending:
            self.client_sends(100)
            self.server_reads(1)
        assert self.kept.keys() == self.open
        assert self.verdicts_seen == self.verdicts_given


TestHistory = History.TestCase


def test_in_order_one_number_is_all_that_is_sent() -> None:
    acknowledgements = Acknowledgements()
    for cursor in range(1, 101):
        acknowledgements.arrived(cursor, f"x{cursor}")
    for cursor in range(1, 101):
        acknowledgements.acknowledge(v1.Acknowledgement(rollout_id=f"x{cursor}"))
    assert acknowledgements.take(1000) == ([], 100)
    assert not acknowledgements.pending and not acknowledgements._dealt and not acknowledgements._arrived


def test_a_server_that_lost_events_is_told_by_id() -> None:
    acknowledgements = Acknowledgements()
    for cursor in (1, 2, 3):
        acknowledgements.arrived(cursor, f"old{cursor}")
    acknowledgements.acknowledge(v1.Acknowledgement(rollout_id="old1"))
    acknowledgements.reattached(newest_cursor=1)
    acknowledgements.arrived(2, "new2")
    acknowledgements.acknowledge(v1.Acknowledgement(rollout_id="old3"))
    assert [message.rollout_id for message in acknowledgements.take(10)[0]] == ["old3"]
    acknowledgements.acknowledge(v1.Acknowledgement(rollout_id="new2"))
    assert acknowledgements.take(10) == ([], 2)
