"""Prompts: token ids in any usual form, or text, into the contract's fast form.

Invariants: ids travel as little-endian uint32 and are never decoded and re-encoded; an id that does not fit 32 bits raises
here, because the wire form could not even carry it. What this does not know: the vocabulary and the context length; the
server refuses what the model cannot take (and an empty prompt), item by item.
"""

import sys
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rolloutd import v1

TOKEN_BYTES = 4  # RolloutSubmission.token_bytes: little-endian uint32
MAX_TOKEN_ID = 2**32 - 1

Prompt = Sequence[int] | npt.NDArray[np.integer] | bytes | str


def set_prompt(submission: v1.RolloutSubmission, prompt: Prompt) -> None:
    """Writes `prompt` into `submission`: str as text, everything else as token ids."""
    if isinstance(prompt, str):
        submission.text = prompt
    else:
        submission.token_bytes = token_bytes(prompt)


def token_bytes(tokens: Sequence[int] | npt.NDArray[np.integer] | bytes) -> bytes:
    """Token ids as little-endian uint32.

    `bytes` are taken as already in that form. TypeError for anything that is no one-dimensional sequence of whole numbers,
    ValueError for an id outside [0, 2**32) or bytes whose length is no multiple of 4.
    """
    if isinstance(tokens, bytes | bytearray | memoryview):
        raw = bytes(tokens)
        if len(raw) % TOKEN_BYTES:
            raise ValueError(f"prompt bytes must be little-endian uint32, 4 bytes a token; got {len(raw)} bytes")
        return raw
    if isinstance(tokens, np.ndarray):
        return _array_bytes(tokens)
    try:
        packed = array("I", tokens)
    except OverflowError:
        position = next(i for i, token in enumerate(tokens) if not 0 <= token <= MAX_TOKEN_ID)
        raise ValueError(f"prompt[{position}] is {tokens[position]}: a token id is in [0, 2**32)") from None
    except TypeError as error:
        raise TypeError(f"a prompt is text or a sequence of token ids (list, numpy array, bytes): {error}") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _array_bytes(tokens: npt.NDArray[np.integer]) -> bytes:
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise TypeError(
            f"a prompt array is one-dimensional and of an integer type, not {tokens.dtype}{list(tokens.shape)}"
        )
    if tokens.dtype != np.uint32 and tokens.size and (tokens.min() < 0 or tokens.max() > MAX_TOKEN_ID):
        position = int(np.argmax((tokens < 0) | (tokens > MAX_TOKEN_ID)))
        raise ValueError(f"prompt[{position}] is {tokens[position]}: a token id is in [0, 2**32)")
    return tokens.astype("<u4", copy=False).tobytes()
