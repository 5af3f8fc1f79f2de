"""`rolloutd demo`: everything as separate processes, a GRPO loop through it, and the figures of what happened.

Engines, the service and this trainer talk over the same sockets as anywhere else. Simulated engines live faster than
real time; so that the service's own patience fits, every duration it decides by is divided by the same time scale.

Invariants
- Whatever happens, no child process is left behind.
- Standard output gets the table and, as its last line, the JSON; progress goes to standard error.
- Exit status 0 only when nothing was lost, duplicated or wrong, and nothing else went wrong.

What this module does not know: how rollouts are scheduled.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolloutd.bench.arguments import positive, positive_int
from rolloutd.bench.ceiling import prefix_hit_ceiling
from rolloutd.bench.demo_cast import Cast
from rolloutd.bench.demo_clock import SimClock
from rolloutd.bench.demo_cpu import CpuMeter
from rolloutd.bench.demo_fleet import SIM_TIME_SCALE, Fleet, SimFleet
from rolloutd.bench.demo_ledger import Ledger
from rolloutd.bench.demo_processes import ChildFailed, Children
from rolloutd.bench.demo_screen import Screen
from rolloutd.bench.demo_sglang import SglangFleet
from rolloutd.bench.demo_trainer import Stuck, Trainer
from rolloutd.bench.demo_watch import watch
from rolloutd.bench.metrics import Summary, summarise
from rolloutd.bench.report import json_line, print_report
from rolloutd.client import RolloutdError, connect

RUN_ID = "demo"
INTERRUPTED_STATUS = 130
SHOWN_PROBLEMS = 5


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it. problems: empty when all is well. notes: for the reader of the figures."""

    summary: Summary
    problems: Sequence[str]
    notes: Sequence[str]


def main(argv: Sequence[str] | None = None) -> int:
    """`rolloutd demo`. Returns the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.engine == "sglang" and arguments.time_scale is not None:
        parser.error("--time-scale is for simulated engines; real ones live in real time")
    fleet: Fleet = (
        SglangFleet() if arguments.engine == "sglang" else SimFleet(time_scale=arguments.time_scale or SIM_TIME_SCALE)
    )
    folder = Path(tempfile.mkdtemp(prefix="rolloutd-demo-"))
    screen = Screen(sys.stderr, quiet=arguments.json_only)
    try:
        outcome = asyncio.run(_interruptible(demo(fleet, arguments.steps, arguments.seed, folder, screen)))
    except (ChildFailed, OSError, RolloutdError) as error:
        print(f"rolloutd demo: {error}\nlogs: {folder}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"rolloutd demo: interrupted; every process is stopped\nlogs: {folder}", file=sys.stderr)
        return INTERRUPTED_STATUS
    for note in outcome.notes:
        screen.say(f"  {note}", style="dim")
    if arguments.json_only:
        print(json_line(outcome.summary))
    else:
        seconds = "simulated" if fleet.modelled else "real"
        print_report(outcome.summary, f"{arguments.steps} steps on {fleet.title}; {seconds} seconds")
    if outcome.problems:
        print("\n".join((*outcome.problems, f"logs: {folder}")), file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


async def demo(fleet: Fleet, steps: int, seed: int, folder: Path, screen: Screen) -> Outcome:
    """Run it all once; logs of the children go to `folder`. Raises ChildFailed and RolloutdError."""
    with screen:
        screen.say(f"rolloutd demo: a GRPO loop of {steps} steps on {fleet.title}", style="bold")
        screen.say(_about(fleet))
        async with Children(folder) as children:
            cast = await Cast.start(fleet, children, screen)
            meter = CpuMeter({child.pid: child.name for child in children.running} | {os.getpid(): "this trainer"})
            async with connect(cast.target, run=RUN_ID, consumer="trainer", auto_acknowledge=False) as client:
                await cast.until_engines_joined(client)
                clock = SimClock(fleet.time_scale)
                ledger = Ledger(clock)
                trainer = Trainer(client, fleet, clock, ledger, steps, seed)
                showing = watch(client, trainer, ledger, clock, steps, screen)
                try:
                    await _beside(trainer.run(), children.until_one_ends(), meter.watch(), showing)
                except Stuck as error:
                    trainer.problems.append(str(error))
                await client.end_run()
            screen.say(
                f"the loop took {clock.now():.0f} {'simulated ' if fleet.modelled else ''}seconds; now tokens are checked"
            )
            notes = await fleet.check(ledger, cast.engine_urls, screen.say)
    return _outcome(fleet, ledger, trainer, [*notes, *_cpu_notes(meter, bool(fleet.modelled))])


def _about(fleet: Fleet) -> str:
    """The work of one step, for a newcomer."""
    shape, slots = fleet.shape, fleet.engines * fleet.slots
    critical, reusable, background = (
        traffic.groups * traffic.samples for traffic in (shape.critical, shape.reusable, shape.background)
    )
    pace = "real time" if fleet.time_scale == 1 else f"{fleet.time_scale:g} simulated seconds pass in a real one"
    return (
        f"each step: {shape.critical.groups} prompts x {shape.critical.samples} = {critical} critical rollouts for {slots} slots, "
        f"beside {reusable} reusable, {background} background and {shape.reward.queries} "
        f"reward queries; {pace}"
    )


def _outcome(fleet: Fleet, ledger: Ledger, trainer: Trainer, notes: Sequence[str]) -> Outcome:
    rollouts = list(ledger)
    prompts = [rollout.item.prompt_bytes for rollout in rollouts if rollout.record.deliveries]
    ceiling = prefix_hit_ceiling(prompts, fleet.page_size_tokens) if prompts else None
    summary = summarise([rollout.record for rollout in rollouts], trainer.steps, ceiling)
    problems = list(trainer.problems)
    for what, count in (
        ("lost", summary.lost),
        ("duplicated", summary.duplicated),
        ("wrong tokens", summary.wrong_tokens),
    ):
        if count:
            problems.append(f"{what}: {count}")
    bad = [rollout for rollout in rollouts if rollout.ended and not rollout.complete and not rollout.record.withdrawn]
    problems += [
        f"{rollout.rollout_id} ended as {rollout.outcome}: {rollout.problem}" for rollout in bad[:SHOWN_PROBLEMS]
    ]
    if ledger.strangers:
        problems.append(
            f"{len(ledger.strangers)} results of rollouts that nobody submitted, e.g. {ledger.strangers[0]}"
        )
    withdrawn = sum(ledger.withdrawn.values())
    if withdrawn:
        notes = [
            *notes,
            f"{withdrawn} background rollouts were cancelled at the end, on purpose; they are not in the figures",
        ]
    return Outcome(summary, problems, notes)


def _cpu_notes(meter: CpuMeter, simulated: bool) -> list[str]:
    """How busy everybody was, and a warning where that stretched simulated time."""
    if not meter.means:
        return []
    shares = ", ".join(f"{name} {share:.0%}" for name, share in meter.means.items())
    short = meter.notes() if simulated else []
    advice = ["simulated seconds may be too long because of this; try a smaller --time-scale"] if short else []
    return [f"CPU, mean share of a core: {shares}", *short, *advice]


async def _beside(work: Coroutine[Any, Any, None], *companions: Coroutine[Any, Any, None]) -> None:
    """Run `work`; a companion that raises ends it. Companions end with it."""
    lead = asyncio.create_task(work)
    others = {asyncio.create_task(companion) for companion in companions}
    tasks = {lead, *others}
    try:
        while not lead.done():
            done, _ = await asyncio.wait({lead, *others}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {lead}:
                others.discard(task)
                task.result()
        lead.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _interruptible(work: Coroutine[Any, Any, Outcome]) -> Outcome:
    """SIGTERM ends it as Ctrl-C does."""
    task = asyncio.ensure_future(work)
    with contextlib.suppress(NotImplementedError):  # no such signal handlers on Windows
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rolloutd demo",
        description="Starts engines and a service as processes of their own, drives a GRPO loop through them, checks every token.",
    )
    add = parser.add_argument
    add(
        "--engine",
        choices=("sim", "sglang"),
        default="sim",
        help="simulated engines, or real SGLang servers on the CPU",
    )
    add("--steps", type=positive_int, default=3, help="training steps")
    add("--seed", type=int, default=0, help="of the workload")
    add("--time-scale", type=positive, help=f"simulated seconds per real second (default {SIM_TIME_SCALE:g})")
    add("--json-only", action="store_true", help="print the JSON line and nothing else")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
