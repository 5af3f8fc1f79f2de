"""The naive twin of the KV cache mirror: one object per block, no bounds. It defines the semantics.

Tests drive it, over the naive prefix index, and the mirror, over the radix index, with the same reports.
"""

from __future__ import annotations

from rolloutd.scheduler.index_base import TOKEN_BYTES, EngineCacheMirror, Namespace
from rolloutd.scheduler.kv_cache_mirror import Owners
from rolloutd.scheduler.kv_changes import KvChange, KvRemoved, KvStored


class Block:
    def __init__(self, parent: Block | None, tokens: bytes, key: tuple[str, str], namespace: Namespace | None) -> None:
        self.parent = parent
        self.tokens = tokens
        self.key = key
        self.namespace = namespace
        self.tiers: set[bool] = set()  # on_host
        self.path: bytes = (parent.path if parent is not None else b"") + tokens
        self.stored_path = self.path  # up to the last block that was stored together with it

    def is_held(self) -> bool:
        return bool(self.tiers) and (self.parent is None or self.parent.is_held())


class NaiveKvCacheMirror:
    def __init__(self, index: EngineCacheMirror) -> None:
        self.index = index
        self.blocks: dict[tuple[str, int], Block] = {}

    def apply(self, engine: str, change: KvChange, owners: Owners) -> None:
        if isinstance(change, KvStored):
            self._stored(engine, change, owners)
        elif isinstance(change, KvRemoved):
            self._removed(engine, change, owners)
        else:
            self.blocks = {key: block for key, block in self.blocks.items() if key[0] != engine}
            self.index.clear_engine(engine)

    def _stored(self, engine: str, stored: KvStored, owners: Owners) -> None:
        parent = None if stored.parent_hash is None else self.blocks.get((engine, stored.parent_hash))
        if stored.parent_hash is not None and parent is None:
            return
        key = (stored.salt, stored.adapter)
        width = len(stored.token_bytes) // len(stored.hashes)
        together: list[Block] = []
        for number, name in enumerate(stored.hashes):
            block = self.blocks.get((engine, name))
            if block is None:
                if parent is not None and not parent.is_held():
                    break
                namespace = owners.earning(*key) if parent is None else parent.namespace
                tokens = stored.token_bytes[number * width : (number + 1) * width]
                block = self.blocks[engine, name] = Block(parent, tokens, key, namespace)
                together.append(block)
                for earlier in together:
                    earlier.stored_path = block.path
                if namespace is not None:
                    self.index.insert(namespace, block.path, engine)
            else:
                together = []
            block.tiers.add(stored.on_host)
            parent = block

    def _removed(self, engine: str, removed: KvRemoved, owners: Owners) -> None:
        for name in removed.hashes:
            block = self.blocks.get((engine, name))
            if block is None:
                continue
            block.tiers.discard(removed.on_host)
            if not block.tiers:
                del self.blocks[engine, name]
                keep_tokens = (len(block.path) - len(block.tokens)) // TOKEN_BYTES
                under = owners.losing(*block.key) + ((block.namespace,) if block.namespace is not None else ())
                for namespace in under:
                    self.index.forget(namespace, block.stored_path, engine, keep_tokens)
