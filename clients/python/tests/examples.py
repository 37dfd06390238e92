"""Uses of every public name, for the type checker. Nothing here runs."""

from __future__ import annotations

from typing import Dict, List, Optional

from tollkeeper import AsyncHeld, AsyncLimiter, Decision, Facts, Held, Limiter, LimitState, TollkeeperError
from tollkeeper.asgi import TollkeeperMiddleware as Asgi
from tollkeeper.fastapi import limited
from tollkeeper.testing import Clock, testing, testing_async
from tollkeeper.wsgi import TollkeeperMiddleware as Wsgi


def in_threads(facts: Facts) -> float:
    limiter = Limiter(limits=[{"name": "per-user", "by": "user", "rate": "100/min"}], store="redis://127.0.0.1/")
    decision: Decision = limiter.check({"user": "alice", "admin": True, "n": 7}, cost=2)
    states: List[LimitState] = limiter.usage(facts)
    headers: Dict[str, str] = limiter.headers(decision)
    remaining: Optional[int] = decision.remaining
    charge: Optional[str] = limiter.reserve(facts, ttl=30).charge
    if charge is not None:
        done: bool = limiter.settle(charge, facts={"tokens": 12}) or limiter.refund(charge, 1)
        print(done, states[0].remaining, headers, remaining)
    with limiter.acquire(facts) as held:
        slot: Held = held
        print(slot.decision.allowed, slot.renew())
    limiter.check({"user": 1.5})  # type: ignore[dict-item]
    limiter.check("alice")  # type: ignore[arg-type]
    return limiter.until_allowed(facts, timeout=1.0).delay


async def in_asyncio(facts: Facts) -> Optional[float]:
    async with AsyncLimiter("tollkeeper.yaml") as limiter:
        async with limiter.acquire(facts) as held:
            slot: AsyncHeld = held
            print(slot.slot, await slot.release())
        later: AsyncHeld = await limiter.acquire(facts)
        print(later.decision.binding, await limiter.policy(), await limiter.explain(facts))
        try:
            return (await limiter.check(facts)).retry_after
        except TollkeeperError as error:
            print(error.code, error.message, error.where)
            return None


def under_test() -> Clock:
    limiter, clock = testing(limits=[], at=0)
    asynchronous, _ = testing_async("tollkeeper.yaml")
    clock.advance(0.6)
    limited(limiter=asynchronous, action="search", user=lambda request: str(request.headers["x-user"]))
    Asgi(None, limiter=limiter)  # type: ignore[arg-type]
    Wsgi(None, limiter=limiter)  # type: ignore[arg-type]
    return clock
