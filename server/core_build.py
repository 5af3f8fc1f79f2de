"""Which rolloutd this is: its release, and whether its scheduling core is compiled with mypyc or the plain Python sources.

Both cores decide the same; the plain one needs about twice the CPU time.

What this module does not know: how it was compiled (`setup.py` at the root of the repository).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from importlib.machinery import EXTENSION_SUFFIXES


def release() -> str:
    """Of the installed distribution; "unknown" where there is none."""
    try:
        return importlib.metadata.version("rolloutd")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def core_is_compiled() -> bool:
    """Whether `rolloutd.scheduler` is found as machine code. Imports no module of it."""
    spec = importlib.util.find_spec("rolloutd.scheduler.machine")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("rolloutd.scheduler.machine is not installed")
    return spec.origin.endswith(tuple(EXTENSION_SUFFIXES))


def core_words() -> str:
    """For people: "compiled core" or "plain Python core"."""
    return "compiled core" if core_is_compiled() else "plain Python core"
