"""Presets: configurations to start from, one YAML file each in `presets/`, for `preset:`, `--preset` and ROLLOUTD_PRESET.

Invariants
- A preset is a file like the user's own; every key that the user gives takes its place (`rules` as a whole list).

What this module does not know: what the keys do.
"""

from __future__ import annotations

from importlib.resources import files

PRESETS = ("grpo-sync", "async-rl", "agentic", "colocated", "simple")


def preset_text(name: str) -> str:
    """The file of one of `PRESETS`."""
    return (files("rolloutd.server") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")
