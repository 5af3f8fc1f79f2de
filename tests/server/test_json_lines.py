"""Records in a rotating file: whole lines, bounded memory and disk, and a writer that survives what goes wrong."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rolloutd.server import json_lines
from rolloutd.server.config import JsonLinesSettings
from rolloutd.server.json_lines import MAX_BUFFERED, JsonLines


def _lines(
    path: Path, render: Callable[[int], str] = json.dumps, max_bytes: int = 1 << 20, files: int = 4
) -> JsonLines[int]:
    return JsonLines(JsonLinesSettings(str(path), max_bytes, files), render, "test")


def _files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def _read(path: Path) -> list[int]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_everything_is_written_by_the_time_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("0\n")  # of an earlier life
    lines = _lines(path)
    lines.start()
    for number in range(1, 1000):
        lines.put(number)
    await lines.close()
    assert _read(path) == list(range(1000))
    assert lines.dropped_records == 0


async def test_the_oldest_file_goes_when_the_last_is_full(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    lines = _lines(path, lambda number: f"{number:09d}", max_bytes=100, files=2)
    lines.start()
    for number in range(95):
        lines.put(number)
    await lines.close()
    files = _files(tmp_path)
    assert [*files] == ["lines", "lines.1", "lines.2"]
    kept = "".join(files[name] for name in ("lines.2", "lines.1", "lines"))
    assert [int(line) for line in kept.split()] == list(range(70, 95))
    assert all(len(text) <= 100 for text in files.values())


async def test_memory_is_bounded_and_what_is_dropped_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    lines = _lines(path)
    for number in range(MAX_BUFFERED + 7):
        lines.put(number)
    assert lines.dropped_records == 7
    await lines.close()
    assert _read(path) == list(range(MAX_BUFFERED))


async def test_a_full_disk_leaves_whole_lines_and_the_next_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines"
    lines = _lines(path)
    write, full = os.write, True

    def half(file: int, data: memoryview) -> int:
        if not full:
            return write(file, data)
        write(file, bytes(data)[:3])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(json_lines.os, "write", half)
    lines.put(1111)
    lines.put(2222)
    await lines._flush()
    full = False
    lines.put(3333)
    await lines.close()
    assert _read(path) == [3333]


async def test_a_record_that_cannot_be_rendered_does_not_end_the_writer(tmp_path: Path) -> None:
    def render(number: int) -> str:
        if number == 1:
            raise ValueError("not this one")
        return str(number)

    path = tmp_path / "lines"
    lines = _lines(path, render)
    lines.put(1)
    await lines._flush()
    lines.put(2)
    await lines.close()
    assert _read(path) == [2]
