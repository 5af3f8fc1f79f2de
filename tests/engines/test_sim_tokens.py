"""The simulated model: continuation, checkability, end of sequence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutd.engines.sim.tokens import (
    EOS_TOKEN,
    FIRST_ORDINARY_TOKEN,
    Finish,
    LengthWriter,
    Model,
    Sampling,
    TokenWriter,
    context_state,
    expected_output,
    prefix_states,
    score,
    verify,
)

PROMPTS = st.lists(st.integers(0, 31_999), min_size=1, max_size=60)
SEEDS = st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1))


def as_bytes(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype="<u4").tobytes()


@given(PROMPTS, st.integers(1, 120), st.integers(0, 120), SEEDS)
def test_continuation_from_any_cut_point_gives_the_uninterrupted_tokens(
    prompt: list[int], max_new: int, cut: int, seed: int | None
) -> None:
    model = Model(mean_output_tokens=40)
    whole = expected_output(prompt, max_new, sampling_seed=seed, model=model)
    cut = min(cut, len(whole.tokens))
    rest = expected_output(prompt + whole.tokens[:cut], max_new - cut, sampling_seed=seed, model=model)
    if whole.finish.kind == "stop" and cut == len(whole.tokens):
        return  # it had ended
    assert whole.tokens[:cut] + rest.tokens == whole.tokens
    assert whole.logprobs[:cut] + rest.logprobs == whole.logprobs
    assert rest.finish == whole.finish


@given(PROMPTS, PROMPTS)
def test_the_state_does_not_depend_on_the_cut(left: list[int], right: list[int]) -> None:
    assert context_state(right, context_state(left)) == context_state(left + right)
    states = prefix_states(left + right)
    assert int(states[len(left)]) == context_state(left)
    assert int(states[-1]) == context_state(as_bytes(left + right))


def test_the_state_over_several_blocks_matches_one_token_at_a_time() -> None:
    tokens = np.random.default_rng(3).integers(0, 32_000, 9_001, dtype=np.uint32)
    state = context_state([])
    for token in tokens.tolist():
        state = context_state([token], state)
    assert context_state(tokens.tobytes()) == state
    assert int(prefix_states(tokens)[-1]) == state


@given(PROMPTS, SEEDS, st.sampled_from(["default", "7"]), st.booleans())
def test_the_vector_form_agrees_with_the_scalar_loop(
    prompt: list[int], seed: int | None, version: str, ignore_eos: bool
) -> None:
    model = Model(seed=5, mean_output_tokens=20, vocabulary_size=500)
    out = expected_output(prompt, 64, sampling_seed=seed, weight_version=version, ignore_eos=ignore_eos, model=model)
    assert (
        verify(
            prompt,
            out.tokens,
            out.logprobs,
            sampling_seed=seed,
            weight_version=version,
            ignore_eos=ignore_eos,
            model=model,
        )
        is None
    )


@given(PROMPTS, st.integers(0, 62), st.sampled_from(["lost", "repeated", "swapped", "changed"]))
def test_a_lost_repeated_swapped_or_changed_token_shows(prompt: list[int], index: int, harm: str) -> None:
    tokens = expected_output(prompt, 64, ignore_eos=True).tokens
    harmed = list(tokens)
    if harm == "lost":
        del harmed[index]
    elif harm == "repeated":
        harmed.insert(index, harmed[index])
    elif harm == "swapped":
        harmed[index], harmed[index + 1] = harmed[index + 1], harmed[index]
    else:
        harmed[index] = FIRST_ORDINARY_TOKEN + (harmed[index] - FIRST_ORDINARY_TOKEN + 1) % (32_000 - 3)
    if harmed == tokens:
        return  # two equal neighbours
    wrong = verify(prompt, harmed, ignore_eos=True)
    assert wrong is not None and wrong >= index


def test_a_logprob_of_another_position_shows() -> None:
    out = expected_output([5, 6, 7], 32, ignore_eos=True)
    shifted = [out.logprobs[-1], *out.logprobs[:-1]]
    assert verify([5, 6, 7], out.tokens, shifted, ignore_eos=True) == 0
    assert verify([5, 6, 7], out.tokens, out.logprobs[:-1], ignore_eos=True) == 31


def test_scoring_the_generated_text_again_gives_the_same_logprobs() -> None:
    prompt = [9, 8, 7]
    out = expected_output(prompt, 50, sampling_seed=4, weight_version="3", ignore_eos=True)
    scores = score(Model(), prompt + out.tokens, "3")
    assert scores[3:].tolist() == out.logprobs
    assert all(-4 <= logprob < 0 for logprob in out.logprobs)
    assert score(Model(), prompt + out.tokens, "4")[3:].tolist() != out.logprobs


def test_seed_version_and_model_change_the_output_and_temperature_zero_ignores_the_seed() -> None:
    def tokens(**words: object) -> list[int]:
        return expected_output([4, 5], 20, ignore_eos=True, **words).tokens  # type: ignore[arg-type]

    different = [tokens(), tokens(sampling_seed=1), tokens(sampling_seed=2), tokens(weight_version="1")]
    different.append(tokens(model=Model(seed=1)))
    assert len({tuple(t) for t in different}) == len(different)
    assert tokens(sampling_seed=1) == tokens(sampling_seed=1)
    assert tokens(sampling_seed=1, temperature=0) == tokens()


def test_end_at_tokens_ends_there_and_nowhere_else() -> None:
    out = expected_output([5] * 10, 1_000, end_at_tokens=300)
    assert len(out.tokens) == 290 and out.tokens[-1] == EOS_TOKEN and EOS_TOKEN not in out.tokens[:-1]
    assert out.finish == Finish("stop", EOS_TOKEN)
    assert expected_output([5] * 10, 100, end_at_tokens=300).finish == Finish("length")
    assert verify([5] * 10, out.tokens, end_at_tokens=300) is None
    assert verify([5] * 10, out.tokens, end_at_tokens=301) == 289


def test_stop_ids_and_min_new_tokens() -> None:
    free = expected_output([5, 6], 40, ignore_eos=True).tokens
    stopped = expected_output([5, 6], 40, ignore_eos=True, stop_token_ids=[free[10]])
    assert stopped.tokens == free[:11] and stopped.finish == Finish("stop", free[10])
    later = expected_output([5, 6], 40, ignore_eos=True, stop_token_ids=[free[10]], min_new_tokens=20)
    assert later.tokens[:10] == free[:10] and free[10] not in later.tokens[:20]
    short = Model(mean_output_tokens=1)
    assert len(expected_output([5], 40, model=short).tokens) == 1
    assert len(expected_output([5], 40, model=short, min_new_tokens=7).tokens) == 8


def test_outputs_have_the_mean_length_asked_for() -> None:
    lengths = [len(expected_output([7, i], 10_000, model=Model(mean_output_tokens=50)).tokens) for i in range(2_000)]
    assert np.mean(lengths) == pytest.approx(50, rel=0.1)


def test_generated_ids_are_ordinary() -> None:
    tokens = expected_output([5], 3_000, ignore_eos=True, model=Model(vocabulary_size=64)).tokens
    assert min(tokens) == FIRST_ORDINARY_TOKEN and max(tokens) == 63


def test_a_weight_switch_keeps_what_was_produced_and_changes_what_follows() -> None:
    sampling = Sampling(64, ignore_eos=True)
    writer = TokenWriter(Model(), [5, 6], sampling, "1")
    writer.write_until(40)
    before = list(writer.tokens)
    writer.switch_weights("2", 25, [5, 6])
    writer.write_until(64)
    assert writer.tokens[:25] == before[:25] and writer.tokens[25:40] != before[25:]
    spans = [("1", 0, 25), ("2", 25, 64)]
    assert verify([5, 6], writer.tokens, writer.logprobs, ignore_eos=True, spans=spans) is None
    assert verify([5, 6], writer.tokens, ignore_eos=True, spans=[("1", 0, 64)]) == 25
    assert verify([5, 6], writer.tokens, ignore_eos=True, spans=spans[:1]) == 25


@given(st.integers(1, 50), st.integers(0, 80), st.one_of(st.none(), st.integers(1, 120)), st.integers(0, 20))
def test_length_writer_ends_where_the_token_writer_does(
    prompt_tokens: int, max_new: int, end_at: int | None, min_new: int
) -> None:
    sampling = Sampling(max_new, min(min_new, max_new), ignore_eos=end_at is None, end_at_tokens=end_at)
    words, lengths = TokenWriter(Model(), [5] * prompt_tokens, sampling, "1"), LengthWriter(prompt_tokens, sampling)
    for count in (7, 33, 200):
        words.write_until(count)
        lengths.write_until(count)
        assert (words.written_tokens, words.finish) == (lengths.written_tokens, lengths.finish)


def test_length_writer_refuses_an_unknowable_length() -> None:
    with pytest.raises(ValueError, match="end_at_tokens"):
        LengthWriter(5, Sampling(10))
