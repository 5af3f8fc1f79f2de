"""`rolloutd config`: the effective configuration as a file that can be used as one.

Invariants
- What is printed loads as the same settings; where a value is not the default, a comment says where it came from.

What this module does not know: what the settings do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

import yaml

from rolloutd.server.config import ServerConfig
from rolloutd.server.config_rules import rules_as_written

_NESTED = ("engines", "pools", "rules")


def show_config(config: ServerConfig, out: TextIO, *, changed_only: bool = False) -> int:
    """Print every key, or only those that are not as by default. Returns the exit code."""
    values = {key: value for key, value in config.values.items() if key != "preset"}
    if changed_only:
        values = {key: value for key, value in values.items() if config.origins[key] != "default"}
    if (preset := config.values["preset"]) is not None:
        print(f"# preset {preset}, written out", file=out)
    sections: dict[str, dict[str, Any]] = {}
    for key, value in sorted(values.items()):
        if key not in _NESTED:
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
    for section, table in sections.items():
        print(f"{section}:", file=out)
        for name, value in table.items():
            origin = config.origins[f"{section}.{name}"]
            comment = "" if origin == "default" else f" # {origin}"
            print(f"  {name}: {_scalar(value)}{comment}", file=out)
    for key in _NESTED:
        if key in values and (not changed_only or values[key]):
            value = rules_as_written(config.scheduler.rules) if key == "rules" else values[key]
            origin = config.origins[key]
            print(_block(key, value, "" if origin == "default" else f" # {origin}"), file=out)
    return 0


def _scalar(value: Any) -> str:
    """One value as YAML reads it, in one line."""
    return str(yaml.safe_dump(value, default_flow_style=True, width=1_000)).removesuffix("...\n").strip()


def _block(key: str, value: Any, comment: str) -> str:
    if not value:
        return f"{key}: {_scalar(value)}{comment}"
    entries: Mapping[str, Any] | list[Any] = value
    text = yaml.safe_dump(entries, sort_keys=False, default_flow_style=None, width=110).rstrip()
    return f"{key}:{comment}\n" + "\n".join(f"  {line}" for line in text.splitlines())
