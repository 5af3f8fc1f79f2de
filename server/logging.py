"""Logs for people and for machines: structlog to standard error, one line an event, console or JSON.

What this module does not know: what is worth logging.
"""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import FilteringBoundLogger, Processor

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure_logging(*, json: bool, level: str) -> None:
    """Set up structlog once per process. `level` is a key of `LEVELS`."""
    renderer: Processor = (
        structlog.processors.JSONRenderer()
        if json
        # Plain traces: pretty ones take a second, in which no rollout moves.
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if json:
        processors.append(structlog.processors.dict_tracebacks)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )


def get_logger(component: str) -> FilteringBoundLogger:
    """A logger whose lines say which part of the server they come from."""
    logger: FilteringBoundLogger = structlog.get_logger(component=component)
    return logger
