"""Children are watched and none is left behind; and who is short of CPU is noticed."""

from __future__ import annotations

import asyncio
import os
import select
import sys
from pathlib import Path

import pytest

from rolloutd.bench.demo_cpu import CpuMeter, Usage
from rolloutd.bench.demo_processes import ChildFailed, Children, free_ports

SLEEPER = "import time, sys; print('here I am', flush=True); time.sleep(600)"
# A child that ignores SIGTERM and has a child of its own, whose id it prints.
STUBBORN = f"""
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], stdout=subprocess.DEVNULL).pid, flush=True)
time.sleep(600)
"""


def alive(pid: int) -> bool:
    """Whether it runs: not gone, and not a zombie that nobody has collected."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_for_end(pid: int) -> None:
    """Return when a process that is not our child is gone; fail after 20 s."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ended, _, _ = select.select([descriptor], [], [], 20.0)
        assert ended, f"process {pid} still runs"
    finally:
        os.close(descriptor)


async def said_something(log: Path) -> bool:
    return bool(await asyncio.to_thread(log.read_text))


async def start(children: Children, program: str) -> int:
    child = await children.start("a child", [sys.executable, "-c", program])
    await children.until_ready(child, lambda: said_something(child.log), 20.0)
    return child.pid


async def test_leaving_ends_children(tmp_path: Path) -> None:
    async with Children(tmp_path) as children:
        pid = await start(children, SLEEPER)
        assert alive(pid)
    assert not alive(pid)


async def test_cancelling_ends_children_and_what_they_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolloutd.bench.demo_processes.STOP_SECONDS", 0.2)
    started = asyncio.Event()
    pids: list[int] = []

    async def work() -> None:
        async with Children(tmp_path) as children:
            pids.append(await start(children, STUBBORN))
            pids.append(int(await asyncio.to_thread((tmp_path / "a-child.log").read_text)))
            started.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await started.wait()
    assert all(map(alive, pids))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not alive(pids[0])
    await asyncio.to_thread(wait_for_end, pids[1])


async def test_a_child_that_ends_early_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    async with Children(tmp_path) as children:
        child = await children.start("engine 1", [sys.executable, "-c", "print('no such flag'); raise SystemExit(2)"])
        with pytest.raises(ChildFailed, match=r"engine 1 ended with status 2 before it was ready.*\n  \| no such flag"):
            await children.until_ready(child, never, 20.0)
        with pytest.raises(ChildFailed, match="engine 1 ended with status 2 in the middle"):
            await children.until_one_ends()


async def test_a_child_that_never_gets_ready_is_named(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    async with Children(tmp_path) as children:
        child = await children.start("engine 1", [sys.executable, "-c", SLEEPER])
        with pytest.raises(ChildFailed, match=r"engine 1 was not ready within 0\.2 s"):
            await children.until_ready(child, never, 0.2)


def test_free_ports_are_different() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(1024 <= port < 65536 for port in ports)


def test_cpu_shares_and_peaks() -> None:
    meter = CpuMeter({1: "engine", 2: "service"})
    for second in range(21):
        burst = min(5.0, max(0.0, second - 5.0))  # from 5 to 10
        engine = Usage(0.1 * second + 0.9 * burst, 0.0)
        meter.sample(float(second), {"engine": engine, "service": Usage(0.2 * second, 0.5 * burst)})
    assert meter.means == {"engine": pytest.approx(0.1 + 4.5 / 20), "service": pytest.approx(0.2)}
    assert meter.peaks == {"engine": pytest.approx(1.0), "service": pytest.approx(0.2)}
    assert meter.total_peak == pytest.approx(1.2)
    notes = meter.notes()
    assert notes[0] == "engine used 100% of a core for 5 s"
    assert notes[-1].startswith("service waited for a core 50% of the time for 5 s")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_cpu_of_this_process_is_read() -> None:
    meter = CpuMeter({os.getpid(): "me"})
    before = meter._read()["me"].used_seconds
    total = 0
    while meter._read()["me"].used_seconds < before + 0.05:
        total += sum(range(10_000))
    assert before > 0
