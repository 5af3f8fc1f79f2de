"""Text prompts into token ids, for pools that have a tokenizer file.

Invariants
- A tokenizer is loaded once, at start: a bad file stops the server with the pool's name.
- Encoding runs in a thread: the library releases the interpreter, so a long prompt does not hold the loop.
- Special tokens are added as the tokenizer's file says, exactly as the engine would add them.

What this module does not know: vocabularies of engines; ids are checked like any other prompt.
"""

from __future__ import annotations

import asyncio
import dataclasses
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rolloutd.scheduler.spec import RolloutSpec
from rolloutd.server.config import PoolSettings
from rolloutd.server.config_keys import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Tokenizers:
    """The tokenizers of this process, by pool."""

    def __init__(self, pools: Mapping[str, PoolSettings]) -> None:
        self._by_pool: dict[str, Tokenizer] = {}
        files = {name: pool.tokenizer for name, pool in pools.items() if pool.tokenizer}
        if not files:
            return
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError("pools.*.tokenizer: needs the package 'tokenizers': install rolloutd[text]") from error
        for name, path in files.items():
            try:
                self._by_pool[name] = Tokenizer.from_file(path)
            except Exception as error:  # the library raises plain Exception
                raise ConfigError(f"pools.{name}.tokenizer: cannot load {path}: {error}") from error

    def wants(self, spec: RolloutSpec) -> bool:
        return spec.text is not None and spec.pool in self._by_pool

    async def apply(self, spec: RolloutSpec) -> RolloutSpec:
        """The spec with ids in place of its text. Only for specs that `wants`."""
        tokenizer, text = self._by_pool[spec.pool], spec.text
        assert text is not None
        encoding = await asyncio.to_thread(tokenizer.encode, text)
        token_bytes = array("I", encoding.ids).tobytes()
        return dataclasses.replace(spec, text=None, token_bytes=token_bytes, return_prompt_tokens=True)
