"""What the core sends an engine is what SGLang's own rule lets in: the simulated engine applies it to the letter."""

from __future__ import annotations

import random

import pytest

from rolloutd.engines.sim.admission import NewTokenRatio, WaitingQueue, select_prefill
from rolloutd.engines.sim.pool import KvPool
from rolloutd.scheduler.promises import FIRST_SHARE, LAST_SHARE, SHARE_DECAY_STEPS, Promise, Promises
from rolloutd.scheduler.states import TaskType
from tests.scheduler.kit import Bench, engine, specs

CAPACITY, PAGE = 16_384, 16
