"""The vocabulary size of a model, from the `config.json` that the engine was started with, where this host can read it.

Invariants
- Only local files are read: a checkpoint folder, or the Hugging Face cache. Nothing is downloaded.
- The figure is the model's own (rows of its embedding), never a tokenizer's.

What this module does not know: engines. SGLang names neither figure nor config in its HTTP answers.
"""

from __future__ import annotations

import json
import os
from pathlib import Path


class UnreadableConfig(ValueError):
    """A config.json that exists and cannot be understood."""


def _hub_cache() -> Path:
    # Order of the variables as huggingface_hub documents it.
    if folder := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(folder)
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"


def _candidates(model: str) -> list[Path]:
    found = [Path(model).expanduser() / "config.json"]
    snapshots = _hub_cache() / ("models--" + model.replace("/", "--")) / "snapshots"
    if not model.startswith(("/", ".", "~")) and snapshots.is_dir():
        found += sorted(
            (folder / "config.json" for folder in snapshots.iterdir() if folder.is_dir()),
            key=lambda path: path.parent.stat().st_mtime,
            reverse=True,
        )
    return found


def vocabulary_size(model: str) -> int | None:
    """Rows of the model's embedding, in tokens; None where no config.json of this model is readable here.

    `model` is a folder or a hub name. UnreadableConfig when the file is there but holds no usable figure.
    """
    for path in _candidates(model):
        try:
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            raise UnreadableConfig(f"{path}: not JSON ({error})") from error
        # Models with several towers keep the language model's figures one level down.
        inner = [config.get(key) for key in ("text_config", "llm_config", "language_config", "thinker_config")]
        for part in [config, *inner]:
            size = part.get("vocab_size") if isinstance(part, dict) else None
            if isinstance(size, int) and size > 0:
                return size
        raise UnreadableConfig(f"{path}: holds no vocab_size")
    return None
