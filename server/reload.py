"""Another configuration without another start: on SIGHUP, and when the file has changed.

Invariants
- A configuration that cannot be read, that the core refuses, or that changes what is fixed while the server runs, changes nothing:
  the old one stays as a whole, a line of the log names the key, and `reloads` counts it.
- A file is read once it has looked the same twice in a row, so that half of one that is being written is not taken for the whole.
- The core hears of a change through one event, `Reconfigure`.

What this module does not know: what settings do, and which of them the core can change.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from rolloutd.scheduler import events
from rolloutd.server.config import ConfigSource, ServerConfig
from rolloutd.server.config_keys import CORE_SECTIONS, ConfigError
from rolloutd.server.logging import get_logger
from rolloutd.server.state import ServerState

LOOK_SECONDS = 2.0
# Each has a way of its own, or belongs to what is bound and opened at the start.
_INSTEAD = {
    "engines": "; use EngineService.RegisterEngine, DrainEngine and RemoveEngine",
    "server": "; start it again",
}

Look = tuple[int, int, int]  # inode, size, time of the last change


class Reloader:
    """`reloads`: "applied", "unchanged", "refused" -> how often. `refused_because`: of the last reload; "" when it went well."""

    def __init__(self, state: ServerState) -> None:
        self.reloads: Counter[str] = Counter(applied=0, unchanged=0, refused=0)
        self.refused_because = ""
        self._state = state
        self._log = get_logger("reload")
        self._lock = asyncio.Lock()
        self._seen = self._read = _look(self._file)

    async def watch(self) -> None:
        """Look at the file from time to time, until cancelled. Returns at once where there is none."""
        while self._file is not None:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Read the file again if it is another than the one read last, and has been so for a look."""
        now = await asyncio.to_thread(_look, self._file)
        settled = now == self._seen
        if now is None and self._seen is not None:
            self._log.warning("configuration_file_gone", file=str(self._file))
        self._seen = now
        if settled and now is not None and now != self._read:
            await self.reload("the file has changed")

    async def on_signal(self) -> None:
        """SIGHUP came."""
        await self.reload("SIGHUP")

    async def reload(self, why: str) -> bool:
        """Read file and environment again and put what changed in force; whether it is in force now."""
        async with self._lock:
            return await self._reload(why)

    async def _reload(self, why: str) -> bool:
        current = self._state.config
        source = current.source
        if source is None:
            return self._refuse(why, "this server was not started from a configuration that could be read again")
        self._read = await asyncio.to_thread(_look, source.file)
        try:
            config = await asyncio.to_thread(source.load)
            changed = changed_keys(current, config)
            if not changed:
                self._note("unchanged")
                self._log.info("configuration_unchanged", why=why)
                return True
            refuse_fixed(config, changed)
        except ConfigError as error:
            return self._refuse(why, str(error))
        refusal = self._state.loop.refusal(events.Reconfigure(config.scheduler))
        if refusal is not None:
            return self._refuse(why, refusal.message)
        self._state.config = config
        self._state.loop.set_interval(config.scheduler.queue.scheduling_interval_ms / 1000)
        self._note("applied")
        self._log.info("configuration_reloaded", why=why, changed=changed)
        return True

    @property
    def _file(self) -> Path | None:
        source: ConfigSource | None = self._state.config.source
        return None if source is None else source.file

    def _note(self, result: str, because: str = "") -> None:
        self.reloads[result] += 1
        self.refused_because = because

    def _refuse(self, why: str, because: str) -> bool:
        self._note("refused", because)
        self._log.warning("configuration_refused", why=why, because=because, kept="the configuration as it was")
        return False


def changed_keys(current: ServerConfig, config: ServerConfig) -> list[str]:
    """Keys whose value is another, in order. A preset is no setting: what it sets is."""
    keys = (current.values.keys() | config.values.keys()) - {"preset"}
    return sorted(key for key in keys if current.values.get(key) != config.values.get(key))


def refuse_fixed(config: ServerConfig, changed: list[str]) -> None:
    """Raises ConfigError for a key that no event of the core can change."""
    for key in changed:
        section = key.partition(".")[0]
        if section not in CORE_SECTIONS and key != "rules":
            instead = _INSTEAD.get(section, _INSTEAD["server"])
            raise ConfigError(f"{key} ({config.origins[key]}): cannot change while the server runs{instead}")


def _look(file: Path | None) -> Look | None:
    """None: there is no such file now."""
    if file is None:
        return None
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
