"""A storage for `limits`, so that slowapi and Flask-Limiter count in Tollkeeper's engine.

>>> import tollkeeper.limits
>>> Limiter(key_func=get_remote_address, storage_uri="tollkeeper+redis://127.0.0.1:6379")

The interface of `limits` increments first and compares afterwards, one limit at a time: a refused request is charged by the
fixed-window strategy, and of several limits the first are charged even if a later one refuses. The middlewares of this
package do neither.
"""

from __future__ import annotations

import time
from typing import Any, Dict, List, Tuple, Type, Union

from limits.limits import GRANULARITIES
from limits.storage import MovingWindowSupport, SlidingWindowCounterSupport, Storage

from ._errors import TollkeeperError
from ._fork import ForkSafeLock
from ._limiter import Limiter, Limits

__all__ = ["TollkeeperStorage"]

#: `incr` gets no limit, so it counts under one that is never reached.
UNBOUNDED = 2**50
FIXED, LOG, SLIDING = "fixed-window", "sliding-log", "sliding-window"

#: Algorithm, limit and period in seconds.
Shape = Tuple[str, int, int]


class TollkeeperStorage(Storage, MovingWindowSupport, SlidingWindowCounterSupport):
    """Counts in this process (`tollkeeper+memory://`) or in Redis (`tollkeeper+` and any URL of a store)."""

    STORAGE_SCHEME = ["tollkeeper+memory"] + [
        f"tollkeeper+{store}"
        for store in (
            "redis", "rediss", "redis+unix",
            "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel",
        )
    ]  # fmt: skip

    def __init__(self, uri: str, wrap_exceptions: bool = False, **options: Any) -> None:
        super().__init__(uri, wrap_exceptions=wrap_exceptions)
        self._store = uri.removeprefix("tollkeeper+")
        self._settings: Dict[str, Any] = options
        self._lock = ForkSafeLock()
        self._limiters: Dict[Shape, Limiter] = {}

    @property
    def base_exceptions(self) -> Union[Type[Exception], Tuple[Type[Exception], ...]]:
        return TollkeeperError

    def incr(self, key: str, expiry: int, amount: int = 1) -> int:
        """Adds to the fixed window of a key; returns its count."""
        decision = self._limiter((FIXED, UNBOUNDED, expiry)).check({"key": key}, amount)
        if decision.remaining is None:  # a failure policy decided, and nothing was counted
            return amount if decision.allowed else UNBOUNDED
        return UNBOUNDED - decision.remaining

    def get(self, key: str) -> int:
        """The count of a key in its fixed window."""
        _limit, expiry = parsed(key)
        return self._used(key, (FIXED, UNBOUNDED, expiry))[0]

    def get_expiry(self, key: str) -> float:
        """When the fixed window of a key ends, in Unix seconds."""
        _limit, expiry = parsed(key)
        return time.time() + self._used(key, (FIXED, UNBOUNDED, expiry))[1]

    def acquire_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        return self._acquire(key, (LOG, limit, expiry), amount)

    def get_moving_window(self, key: str, limit: int, expiry: int) -> Tuple[float, int]:
        used, reset_after = self._used(key, (LOG, limit, expiry))
        return time.time() + reset_after - expiry, used

    def acquire_sliding_window_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        return self._acquire(key, (SLIDING, limit, expiry), amount)

    def get_sliding_window(self, key: str, expiry: int) -> Tuple[int, float, int, float]:
        limit, _expiry = parsed(key)
        used, reset_after = self._used(key, (SLIDING, limit, expiry))
        return 0, 0.0, used, reset_after

    def clear_sliding_window(self, key: str, expiry: int) -> None:
        self.clear(key)

    def clear(self, key: str) -> None:
        """Forgets a key under every strategy."""
        limit, expiry = parsed(key)
        for shape in ((FIXED, UNBOUNDED, expiry), (LOG, limit, expiry), (SLIDING, limit, expiry)):
            self._limiter(shape).forget(named(shape), {"key": key})

    def check(self) -> bool:
        """Whether the store answers."""
        return self._limiter((FIXED, UNBOUNDED, 1)).peek({"key": "health"}).degraded is None

    def reset(self) -> None:
        """Forgets all keys; only in memory, since in Redis other services may share the prefix."""
        if self._store != "memory://":
            raise NotImplementedError
        with self._lock:
            limiters, self._limiters = self._limiters, {}
        for limiter in limiters.values():
            limiter.close()

    def _acquire(self, key: str, shape: Shape, amount: int) -> bool:
        return self._limiter(shape).check({"key": key}, amount).allowed

    def _used(self, key: str, shape: Shape) -> Tuple[int, float]:
        """How much of a limit a key has used, and seconds until all of it is available again."""
        state = self._limiter(shape).usage({"key": key})[0]
        if state.remaining is None:
            return (0 if state.allowed else shape[1]), 0.0
        return shape[1] - state.remaining, state.reset_after or 0.0

    def _limiter(self, shape: Shape) -> Limiter:
        limiter = self._limiters.get(shape)
        if limiter is None:
            with self._lock:
                limiter = self._limiters.get(shape)
                if limiter is None:
                    limits: Limits = [limit_of(shape)]
                    limiter = Limiter(limits=limits, store=self._store, **self._settings)
                    self._limiters[shape] = limiter
        return limiter


def limit_of(shape: Shape) -> Dict[str, Any]:
    algorithm, limit, expiry = shape
    return {"name": named(shape), "by": "key", "rate": f"{limit}/{expiry}s", "algorithm": algorithm}


def named(shape: Shape) -> str:
    return "limits." + ".".join(map(str, shape))


def parsed(key: str) -> Tuple[int, int]:
    """Limit and period of a key as `limits` writes it: `LIMITER/alice/5/1/minute`."""
    parts: List[str] = key.rsplit("/", 3)
    try:
        _name, amount, multiples, granularity = parts
        return int(amount), int(multiples) * GRANULARITIES[granularity].GRANULARITY.seconds
    except (KeyError, ValueError):
        message = "not a key of `limits` such as LIMITER/alice/5/1/minute"
        raise TollkeeperError("invalid_fact", f"{key[:64]!r}: {message}", "key") from None
