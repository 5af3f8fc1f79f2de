"""The simulated model: the next token is a fixed function of the whole context.

Invariants
- The state is a polynomial hash (mod 2^64) over all tokens so far, prompt and output alike; it does not matter where
  the output began. So prompt + partial output continues with exactly the tokens of the uninterrupted run, and a lost,
  repeated or swapped token changes everything after it.
- The log-prob of a token is a function of (state, weight version, token): scoring a generated text again (REPLAY)
  gives the same values. It is a multiple of 2^-14 in [-4, 0), exact in float32.
- Generated ids are ordinary ones (3 and up) or EOS; 0 and 2 are never generated.
- The scalar loop (`TokenWriter`) and the vector form (`predict`) agree; tests drive both.

What this module does not know: time, memory, the wire. Without a seed, or at temperature 0, output is "greedy":
a real engine would draw at random when temperature is above 0 and no seed is honoured.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
TokenIds = Sequence[int] | bytes | npt.NDArray[np.uint32]

EOS_TOKEN = 1
FIRST_ORDINARY_TOKEN = 3
MEAN_OUTPUT_TOKENS = 512
VOCABULARY_SIZE = 32_000

_MASK = (1 << 64) - 1
# Odd multipliers: the first is the state's (Knuth's MMIX generator; 5 mod 8, so a swap of two tokens always shows),
# the others (golden ratio, splitmix64's finaliser) spread the state into the token and its log-prob.
_STEP = 6364136223846793005
_MIX = 0x9E3779B97F4A7C15
_TOKEN_MIX = 0x94D049BB133111EB
_EMPTY_STATE = 0x2545F4914F6CDD1D
_LOGPROB_UNIT = 2.0**-14
_LOGPROBS = [-(rank + 1) * _LOGPROB_UNIT for rank in range(1 << 16)]

_BLOCK = 4096
_POWERS: U64 = np.multiply.accumulate(np.full(_BLOCK, _STEP, dtype=np.uint64))  # STEP^1 .. STEP^BLOCK
_DESCENDING: U64 = np.concatenate([_POWERS[-2::-1], np.ones(1, dtype=np.uint64)])  # STEP^(BLOCK-1) .. STEP^0
_INVERSE_POWERS: U64 = np.multiply.accumulate(np.full(_BLOCK, pow(_STEP, -1, 1 << 64), dtype=np.uint64))


def as_array(tokens: TokenIds) -> npt.NDArray[np.uint32]:
    """Token ids as uint32; bytes are little-endian uint32."""
    if isinstance(tokens, bytes):
        return np.frombuffer(tokens, dtype="<u4")
    return np.asarray(tokens, dtype=np.uint32)


def context_state(tokens: TokenIds, state: int = _EMPTY_STATE) -> int:
    """State after `tokens`, from `state` (default: the empty context). Independent of how a context is cut."""
    values = as_array(tokens).astype(np.uint64)
    for start in range(0, len(values), _BLOCK):
        block = values[start : start + _BLOCK]
        count = len(block)
        state = (state * int(_POWERS[count - 1]) + int(np.dot(block, _DESCENDING[-count:]))) & _MASK
    return state


def prefix_states(tokens: TokenIds, state: int = _EMPTY_STATE) -> U64:
    """States before each of the n tokens, and after the last: n + 1 values."""
    values = as_array(tokens).astype(np.uint64)
    states = np.empty(len(values) + 1, dtype=np.uint64)
    states[0] = state
    for start in range(0, len(values), _BLOCK):
        block = values[start : start + _BLOCK]
        count = len(block)
        sums = np.cumsum(block * _INVERSE_POWERS[:count], dtype=np.uint64)
        states[start + 1 : start + count + 1] = (sums + states[start]) * _POWERS[:count]
    return states


@dataclass(frozen=True, slots=True)
class Model:
    """The "weights": engines with equal seed, version, vocabulary and mean length generate the same tokens."""

    seed: int = 0
    vocabulary_size: int = VOCABULARY_SIZE
    mean_output_tokens: int = MEAN_OUTPUT_TOKENS

    def __post_init__(self) -> None:
        if self.vocabulary_size <= FIRST_ORDINARY_TOKEN + 1:
            raise ValueError(f"vocabulary_size: {self.vocabulary_size} must be above {FIRST_ORDINARY_TOKEN + 1}")
        if self.mean_output_tokens < 1:
            raise ValueError(f"mean_output_tokens: {self.mean_output_tokens} must be at least 1")

    def weight_key(self, weight_version: str) -> int:
        """64-bit key of one weight version."""
        digest = hashlib.blake2b(f"{self.seed}:{weight_version}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    @property
    def eos_threshold(self) -> int:
        """Of 2^32 draws, how many end a sequence."""
        return (1 << 32) // self.mean_output_tokens


@dataclass(frozen=True, slots=True)
class Sampling:
    """What of a request's sampling parameters changes the tokens here.

    end_at_tokens: context length (prompt + output) at which EOS is generated; None draws it per position.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    sampling_seed: int | None = None
    temperature: float = 1.0
    ignore_eos: bool = False
    end_at_tokens: int | None = None
    stop_token_ids: frozenset[int] = frozenset()

    @property
    def seed_key(self) -> int:
        """0 for greedy, else a 64-bit key of the seed."""
        if self.sampling_seed is None or self.temperature == 0:
            return 0
        return ((self.sampling_seed & _MASK) * _MIX + _STEP) & _MASK


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sequence ended by itself: "stop" with the matched id, or "length"."""

    kind: str
    matched: int | None = None


class LengthWriter:
    """Stands in for `TokenWriter` where only counts matter: it knows when a sequence ends, and writes no tokens itself.

    Needs the end to be known without them: `end_at_tokens`, or `ignore_eos` (then the limit). Stop ids are not looked at.
    """

    __slots__ = ("_end_finish", "end_tokens", "finish", "logprobs", "tokens", "written_tokens")

    def __init__(self, prompt_tokens: int, sampling: Sampling) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.written_tokens = 0
        self.finish: Finish | None = None
        self.end_tokens = sampling.max_new_tokens
        if not sampling.ignore_eos:
            if sampling.end_at_tokens is None:
                raise ValueError("end_at_tokens: needed when no tokens are written (or set ignore_eos)")
            if prompt_tokens + 1 + sampling.min_new_tokens <= sampling.end_at_tokens <= prompt_tokens + self.end_tokens:
                self.end_tokens = sampling.end_at_tokens - prompt_tokens
                self.finish = Finish("stop", EOS_TOKEN)
        if self.finish is None:
            self.finish = Finish("length")
        self._end_finish, self.finish = self.finish, (self.finish if self.end_tokens == 0 else None)

    def switch_weights(self, weight_version: str, keep: int, prompt: TokenIds) -> None:
        """Lengths do not depend on weights."""

    def write_until(self, count: int) -> None:
        """Advance to `count` tokens or the end."""
        self.written_tokens = max(self.written_tokens, min(count, self.end_tokens))
        if self.written_tokens == self.end_tokens:
            self.finish = self._end_finish


class TokenWriter:
    """Writes one sequence's output. `tokens` and `logprobs` may run ahead of what the engine has "computed"."""

    __slots__ = (
        "_model",
        "_prompt_tokens",
        "_sampling",
        "_seed_key",
        "_state",
        "_weight_key",
        "finish",
        "logprobs",
        "tokens",
    )

    def __init__(self, model: Model, prompt: TokenIds, sampling: Sampling, weight_version: str) -> None:
        self._model = model
        self._sampling = sampling
        self._seed_key = sampling.seed_key
        self._weight_key = model.weight_key(weight_version)
        self._state = context_state(prompt)
        self._prompt_tokens = len(as_array(prompt))
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish: Finish | None = Finish("length") if sampling.max_new_tokens == 0 else None

    @property
    def written_tokens(self) -> int:
        """Tokens written so far."""
        return len(self.tokens)

    def switch_weights(self, weight_version: str, keep: int, prompt: TokenIds) -> None:
        """Drop what was written beyond `keep` tokens and go on under another weight version."""
        self._weight_key = self._model.weight_key(weight_version)
        if len(self.tokens) > keep:
            del self.tokens[keep:], self.logprobs[keep:]
            self.finish = None
            self._state = context_state(self.tokens, context_state(prompt))

    def write_until(self, count: int) -> None:
        """Write until `count` tokens exist or the sequence has ended."""
        if self.finish is not None:
            return
        sampling, written = self._sampling, len(self.tokens)
        count = min(count, sampling.max_new_tokens)
        self._write(min(count, sampling.min_new_tokens) - written, may_end=False)
        end_index = count
        if sampling.end_at_tokens is not None and not sampling.ignore_eos:
            index = sampling.end_at_tokens - self._prompt_tokens - 1
            if len(self.tokens) <= index < count:
                end_index = index
        self._write(end_index - len(self.tokens), may_end=True)
        if self.finish is None and len(self.tokens) == end_index < count:
            self._write_eos()
        if self.finish is None and len(self.tokens) == sampling.max_new_tokens:
            self.finish = Finish("length")

    def _write(self, count: int, may_end: bool) -> None:
        """Write up to `count` tokens. A real engine masks EOS and stop ids where the sequence may not end yet."""
        state, weight_key, seed_key = self._state, self._weight_key, self._seed_key
        ordinary = self._model.vocabulary_size - FIRST_ORDINARY_TOKEN
        drawn_eos = may_end and not self._sampling.ignore_eos and self._sampling.end_at_tokens is None
        threshold = self._model.eos_threshold if drawn_eos else 0
        stops = self._sampling.stop_token_ids
        append_token, append_logprob = self.tokens.append, self.logprobs.append
        for _ in range(count):
            drawn = ((state ^ weight_key) * _MIX) & _MASK
            draw = (drawn ^ seed_key) >> 32
            if draw < threshold:
                self._state = state
                self._write_eos()
                return
            token = FIRST_ORDINARY_TOKEN + draw % ordinary
            while token in stops and not may_end:
                token = FIRST_ORDINARY_TOKEN + (token - FIRST_ORDINARY_TOKEN + 1) % ordinary
            append_token(token)
            append_logprob(_LOGPROBS[((drawn + token * _TOKEN_MIX) & _MASK) >> 48])
            state = (state * _STEP + token) & _MASK
            if token in stops:
                self.finish = Finish("stop", token)
                break
        self._state = state

    def _write_eos(self) -> None:
        drawn = ((self._state ^ self._weight_key) * _MIX) & _MASK
        self.tokens.append(EOS_TOKEN)
        self.logprobs.append(_LOGPROBS[((drawn + EOS_TOKEN * _TOKEN_MIX) & _MASK) >> 48])
        self._state = (self._state * _STEP + EOS_TOKEN) & _MASK
        self.finish = Finish("stop", EOS_TOKEN)


@dataclass(frozen=True, slots=True)
class Expected:
    """What an engine must answer: n tokens, n log-probs, why it ended."""

    tokens: list[int]
    logprobs: list[float]
    finish: Finish


def expected_output(
    prompt: TokenIds,
    max_new_tokens: int,
    *,
    sampling_seed: int | None = None,
    temperature: float = 1.0,
    weight_version: str = "default",
    end_at_tokens: int | None = None,
    ignore_eos: bool = False,
    min_new_tokens: int = 0,
    stop_token_ids: Sequence[int] = (),
    model: Model = Model(),
) -> Expected:
    """The whole output of one request under one weight version, about half a microsecond per token."""
    sampling = Sampling(
        max_new_tokens, min_new_tokens, sampling_seed, temperature, ignore_eos, end_at_tokens, frozenset(stop_token_ids)
    )
    writer = TokenWriter(model, prompt, sampling, weight_version)
    writer.write_until(max_new_tokens)
    assert writer.finish is not None
    return Expected(writer.tokens, writer.logprobs, writer.finish)


def score(model: Model, tokens: TokenIds, weight_version: str = "default") -> npt.NDArray[np.float32]:
    """Log-prob of each of n tokens given those before it. A real engine has none for the first: use from index 1."""
    states = prefix_states(tokens)[:-1]
    return _logprobs(states, np.uint64(model.weight_key(weight_version)), as_array(tokens))


def _logprobs(states: U64, weight_keys: U64 | np.uint64, tokens: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    drawn = (states ^ weight_keys) * np.uint64(_MIX)
    spread = (drawn + tokens.astype(np.uint64) * np.uint64(_TOKEN_MIX)) >> np.uint64(48)
    result: npt.NDArray[np.float32] = (spread.astype(np.float32) + np.float32(1)) * np.float32(-_LOGPROB_UNIT)
    return result


def verify(
    prompt: TokenIds,
    tokens: TokenIds,
    logprobs: Sequence[float] | npt.NDArray[np.float32] | None = None,
    *,
    sampling_seed: int | None = None,
    temperature: float = 1.0,
    spans: Sequence[tuple[str, int, int]] | None = None,
    weight_version: str = "default",
    end_at_tokens: int | None = None,
    ignore_eos: bool = False,
    model: Model = Model(),
) -> int | None:
    """Index of the first output token (or log-prob) that is not the model's, or None when all are right.

    `spans` are (weight version, start, end) over `tokens`; they must cover it, else the first uncovered index is wrong.
    Does not know min_new_tokens (use `expected_output`); whether the end came too early is the caller's finish reason.
    """
    output = as_array(tokens)
    prompt_array = as_array(prompt)
    if logprobs is not None and len(logprobs) != len(output):
        return min(len(logprobs), len(output))
    states = prefix_states(output, context_state(prompt_array))[:-1]
    keys = np.zeros(len(output), dtype=np.uint64)
    covered = np.zeros(len(output), dtype=bool)
    for version, start, end in spans if spans is not None else [(weight_version, 0, len(output))]:
        keys[start:end] = model.weight_key(version)
        covered[start:end] = True
    sampling = Sampling(len(output), 0, sampling_seed, temperature, ignore_eos, end_at_tokens)
    right = covered & (predict(model, states, keys, sampling, len(prompt_array)) == output)
    if logprobs is not None:
        right &= _logprobs(states, keys, output) == np.asarray(logprobs, np.float32)
    wrong = np.flatnonzero(~right)
    return int(wrong[0]) if len(wrong) else None


def predict(
    model: Model, states: U64, weight_keys: U64, sampling: Sampling, prompt_tokens: int
) -> npt.NDArray[np.uint32]:
    """Vector form of the scalar loop, without min_new_tokens: the token that follows each state."""
    draws = ((states ^ weight_keys) * np.uint64(_MIX) ^ np.uint64(sampling.seed_key)) >> np.uint64(32)
    ordinary = np.uint64(model.vocabulary_size - FIRST_ORDINARY_TOKEN)
    tokens = (draws % ordinary).astype(np.uint32) + np.uint32(FIRST_ORDINARY_TOKEN)
    if not sampling.ignore_eos:
        if sampling.end_at_tokens is None:
            tokens[draws < np.uint64(model.eos_threshold)] = EOS_TOKEN
        else:
            index = sampling.end_at_tokens - prompt_tokens - 1
            if 0 <= index < len(tokens):
                tokens[index] = EOS_TOKEN
    return tokens
