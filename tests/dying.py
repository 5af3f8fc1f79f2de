"""Children that die with the test run, however it ends.

The usual way, a `preexec_fn`, forks this process first; gRPC's threads do not survive that, and now and then the child
aborts before it begins. So the child asks for its end itself and then becomes the command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

# prctl(PR_SET_PDEATHSIG, SIGKILL); the numbers are <linux/prctl.h>'s and <signal.h>'s.
_BECOME = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"


def dying(command: Sequence[str]) -> list[str]:
    """A command that runs `command` until the process that started it ends."""
    return [sys.executable, "-ISc", _BECOME, *command] if sys.platform == "linux" else list(command)
