"""Limiters on a clock that only tests move, so that tests do not sleep.

>>> limiter, clock = testing(limits=[{"name": "per-user", "by": "user", "rate": "1/s"}])
>>> limiter.check({"user": "alice"}).allowed, limiter.check({"user": "alice"}).allowed
(True, False)
>>> clock.advance(1)
>>> limiter.check({"user": "alice"}).allowed
True
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

from ._engine import Engine
from ._limiter import AsyncLimiter, Config, Limiter, Limits


class Clock:
    """The clock of a limiter under test."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def advance(self, seconds: float) -> None:
        """Moves the time forward."""
        self._engine.advance(seconds)


def testing(
    config: Optional[Config] = None, *, limits: Optional[Limits] = None, at: float = 0, **settings: Any
) -> Tuple[Limiter, Clock]:
    """A limiter on the memory store, and its clock, which starts at `at` (Unix seconds)."""
    engine = _engine(config, limits, at, settings)
    return Limiter._of(engine), Clock(engine)


def testing_async(
    config: Optional[Config] = None, *, limits: Optional[Limits] = None, at: float = 0, **settings: Any
) -> Tuple[AsyncLimiter, Clock]:
    """As `testing`, for asyncio."""
    engine = _engine(config, limits, at, settings)
    return AsyncLimiter._of(engine), Clock(engine)


def _engine(config: Optional[Config], limits: Optional[Limits], at: float, settings: Any) -> Engine:
    if (config is None) == (limits is None):
        raise TypeError("testing takes a config file or limits=[…]")
    return Engine(config=config, limits=limits, store="memory://", at=at, settings=settings)


# pytest would take them for tests.
testing.__test__ = testing_async.__test__ = False  # type: ignore[attr-defined]
