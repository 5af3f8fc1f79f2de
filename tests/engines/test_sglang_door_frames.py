"""Cutting the stream into events, and adding frames up to tokens: pure functions, nasty inputs."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutd.engines.base import AttemptRequest, Slice
from rolloutd.engines.collector import Collector
from rolloutd.engines.frames import Frame, FrameError, decode_frame
from rolloutd.engines.sse import EventReader

REQUEST = AttemptRequest("a" * 32, 100, bytes(4), logprobs=True, top_logprobs=1)


def tokens_of(answer: Slice) -> list[int]:
    return [int(token) for token in np.frombuffer(answer.token_bytes, "<u4")]


def lp(token: int) -> float:
    return -token / 8  # exact in float32


def frame(
    ids: list[int], total: int, *, logprob_ids: list[int] | None = None, text: str | None = None, **meta: Any
) -> Frame:
    """A frame as the engine writes it; log-probs belong to `logprob_ids`, by default to `ids`."""
    named = ids if logprob_ids is None else logprob_ids
    body = {
        "text": "".join(chr(65 + token % 26) for token in ids) if text is None else text,
        "output_ids": ids,
        "meta_info": {
            "id": "a" * 32,
            "finish_reason": None,
            "completion_tokens": total,
            "output_token_logprobs": [[lp(token), token, None] for token in named],
            "output_top_logprobs": [[[lp(token), token, None]] for token in named],
            **meta,
        },
    }
    return decode_frame(msgspec.json.encode(body))


def check(collector: Collector, wanted: list[int]) -> Slice:
    answer = collector.slice("abort")
    assert tokens_of(answer) == wanted
    assert np.frombuffer(answer.logprob_bytes, "<f4").tolist() == [lp(token) for token in wanted]
    assert answer.top_logprobs == tuple(((lp(token), token),) for token in wanted)
    assert answer.text == "".join(chr(65 + token % 26) for token in wanted)
    return answer


# Events


@pytest.mark.parametrize(
    ("stream", "wanted"),
    [
        (b"data: one\n\ndata: two\n\n", [b"one", b"two"]),
        (b"data: one\r\n\r\ndata: two\r\n\r\n", [b"one", b"two"]),
        (b"data:tight\n\ndata:  wide\n\n", [b"tight", b" wide"]),
        (b": comment\nevent: token\nid: 7\ndata: one\n\n", [b"one"]),
        (b"data: first line\ndata: second line\n\n", [b"first line\nsecond line"]),
        (b"\n\n\ndata: one\n\n\n\n", [b"one"]),
        ('data: {"text":"wörld 🙂"}\n\n'.encode(), ['{"text":"wörld 🙂"}'.encode()]),
        (b"data: cut off\n", []),
        (b"data: \n\n", [b""]),
    ],
)
def test_events_however_the_bytes_are_cut(stream: bytes, wanted: list[bytes]) -> None:
    for size in (1, 2, 3, 5, len(stream)):
        reader = EventReader()
        got = [event for start in range(0, len(stream), size) for event in reader.feed(stream[start : start + size])]
        assert got == wanted, f"in pieces of {size}"


def test_an_unfinished_event_is_known() -> None:
    reader = EventReader()
    reader.feed(b"data: one\n\ndata: tw")
    assert reader.unfinished
    reader.feed(b"o\n\n")
    assert not reader.unfinished


# Frames


def test_incremental_frames_add_up() -> None:
    collector = Collector(REQUEST, incremental=True)
    assert [collector.add(frame([1], 1)), collector.add(frame([2, 3], 3)), collector.add(frame([4], 4))] == [1, 2, 1]
    check(collector, [1, 2, 3, 4])


def test_cumulative_frames_may_skip() -> None:
    collector = Collector(REQUEST, incremental=False)
    assert collector.add(frame([1], 1)) == 1
    assert collector.add(frame([1, 2, 3, 4, 5], 5)) == 4
    assert collector.add(frame([1, 2, 3, 4, 5], 5)) == 0
    check(collector, [1, 2, 3, 4, 5])


ABORT = {"type": "abort", "message": "Abort in waiting queue"}


@pytest.mark.parametrize(
    ("seen", "pending"), [([1, 2, 3], []), ([1, 2, 3], [4]), ([1], [2, 3, 4]), ([5, 5, 5], [5]), ([], [7, 8])]
)
def test_the_odd_abort_frame_never_doubles_a_token(seen: list[int], pending: list[int]) -> None:
    """Alone, or merged behind frames that were still waiting: last token again, whole text, whole log-prob lists."""
    collector = Collector(REQUEST, incremental=True)
    for number, token in enumerate(seen):
        collector.add(frame([token], number + 1))
    whole = seen + pending
    letters = "".join(chr(65 + token % 26) for token in pending) + "".join(chr(65 + token % 26) for token in whole)
    odd = frame([*pending, whole[-1]], len(whole), logprob_ids=pending + whole, text=letters, finish_reason=ABORT)
    assert collector.add(odd) == len(pending)
    assert collector.finish is not None and collector.finish.type == "abort"
    check(collector, whole)


def test_the_odd_abort_frame_of_work_that_never_began() -> None:
    collector = Collector(REQUEST, incremental=True)
    # Such an answer lacks most fields.
    body = {"text": "", "output_ids": [], "meta_info": {"finish_reason": ABORT, "completion_tokens": 0}}
    never = decode_frame(msgspec.json.encode(body))
    assert collector.add(never) == 0
    answer = check(collector, [])
    assert answer.version_spans == () and answer.prompt_tokens == 0


def test_a_cumulative_abort_frame_holds_everything_once() -> None:
    collector = Collector(REQUEST, incremental=False)
    collector.add(frame([1, 2], 2))
    collector.add(frame([1, 2, 3], 3, finish_reason=ABORT))
    check(collector, [1, 2, 3])


def test_a_repeated_frame_is_ignored() -> None:
    collector = Collector(REQUEST, incremental=True)
    collector.add(frame([1], 1))
    collector.add(frame([2, 3], 3))
    assert collector.add(frame([2, 3], 3)) == 0
    check(collector, [1, 2, 3])


@pytest.mark.parametrize(
    ("incremental", "bad"),
    [
        (True, frame([9], 5)),  # two tokens lost
        (True, frame([9, 9, 9], 4)),  # more than one too many
        (True, frame([8, 9], 2)),  # known tokens that are not the known ones
        (True, frame([9], 1)),  # goes back
        (True, frame([9], 3, logprob_ids=[])),  # no log-prob
        (True, frame([1 << 40], 3)),
        (True, frame([-1], 3)),
        (False, frame([1, 2, 9], 4)),
        (False, frame([1, 9, 9], 3)),  # contradicts token 1
        (False, frame([1], 1)),
    ],
)
def test_nonsense_is_an_error_and_leaves_what_there_was(incremental: bool, bad: Frame) -> None:
    collector = Collector(REQUEST, incremental=incremental)
    collector.add(frame([1, 2], 2))
    with pytest.raises(FrameError):
        collector.add(bad)
    check(collector, [1, 2])


def test_the_filler_token_of_a_refusal_is_not_output() -> None:
    collector = Collector(REQUEST, incremental=True)
    refused = {"type": "abort", "message": "too long", "status_code": 400, "err_type": "BadRequestError"}
    assert collector.add(frame([514], 1, finish_reason=refused, prompt_tokens=1)) == 0
    answer = check(collector, [])
    assert answer.prompt_tokens == 0


def test_missing_logprobs_are_nan() -> None:
    collector = Collector(REQUEST, incremental=True)
    odd = frame([3], 1)
    assert odd.meta_info is not None
    odd.meta_info.output_token_logprobs = [(None, 3, None)]
    collector.add(odd)
    assert math.isnan(np.frombuffer(collector.slice("length").logprob_bytes, "<f4")[0])


def test_versions_from_the_final_answer_win() -> None:
    collector = Collector(REQUEST, incremental=True)
    collector.add(frame([1, 2], 2, weight_version="1"))
    collector.add(frame([3], 3, weight_version="2"))
    # Before it comes, the frame in which they changed may hold tokens of both.
    cut = collector.slice("stop")
    assert (cut.version_spans, cut.finish_reason, tokens_of(cut)) == ((("1", 0, 2),), "abort", [1, 2])
    spans = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 4}]
    collector.add(
        frame([4], 4, weight_version="2", weight_versions=spans, finish_reason={"type": "length", "length": 4})
    )
    assert collector.slice("length").version_spans == (("1", 0, 1), ("2", 1, 4))


def test_one_span_when_the_final_answer_has_none() -> None:
    collector = Collector(REQUEST, incremental=True)
    collector.add(frame([1, 2], 2, weight_version="5"))
    collector.add(frame([3], 3, weight_version="5", finish_reason={"type": "length", "length": 3}))
    assert collector.slice("length").version_spans == (("5", 0, 3),)


@pytest.mark.parametrize(("matched", "wanted"), [(0, 0), ("END", "END"), ([7, 0], 0), (None, None)])
def test_matched_stop(matched: Any, wanted: Any) -> None:
    collector = Collector(REQUEST, incremental=True)
    collector.add(frame([1], 1, finish_reason={"type": "stop", "matched": matched}))
    answer = collector.slice("stop")
    assert answer.matched_stop == wanted


def test_extras_keep_what_was_asked_for_only() -> None:
    collector = Collector(REQUEST, incremental=True)
    for total, ids in ((1, [1]), (3, [2, 3])):
        piece = frame(ids, total)
        meta = {
            "id": "a",
            "queue_time": 0.1,
            "output_token_ids_logprobs": [[[0.0, 9, None]]] * len(ids),
            "hidden_states": [total],
        }
        collector.add_extras(meta, collector.add(piece))
    assert collector.slice("length").extras == {
        "output_token_ids_logprobs": [[[0.0, 9, None]]] * 3,
        "hidden_states": [3],
    }


@given(
    st.lists(st.integers(3, 30), min_size=1, max_size=40),
    st.lists(st.integers(1, 5), min_size=1, max_size=40),
    st.booleans(),
    st.integers(0, 40),
)
def test_any_cut_of_any_answer_gives_each_token_once(
    output: list[int], steps: list[int], incremental: bool, repeat_at: int
) -> None:
    collector = Collector(REQUEST, incremental=incremental)
    sent = 0
    for number, step in enumerate(steps):
        total = min(len(output), sent + step)
        shown = output[sent:total] if incremental else output[:total]
        collector.add(frame(shown, total))
        if number == repeat_at:
            collector.add(frame(shown, total))
        sent = total
    check(collector, output[:sent])
