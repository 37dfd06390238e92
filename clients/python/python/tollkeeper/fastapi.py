"""Limits of single routes in FastAPI, next to `tollkeeper.asgi.TollkeeperMiddleware`.

>>> @app.get("/search", dependencies=[Depends(limited(action="search", user=lambda request: request.state.user))])
"""

from __future__ import annotations

import asyncio
from typing import Any, Awaitable, Callable, Optional, Union

from fastapi import HTTPException, Request, Response

from .asgi import LIMITER, TollkeeperMiddleware, resolved
from ._limiter import AsyncLimiter

__all__ = ["TollkeeperMiddleware", "limited"]

Value = Union[str, int, bool]


def limited(
    *,
    limiter: Optional[AsyncLimiter] = None,
    cost: int = 1,
    **facts: Union[Value, Callable[[Request], Union[Value, Awaitable[Value]]]],
) -> Callable[[Request, Response], Awaitable[None]]:
    """A dependency that checks a request with these facts, and answers 429 if it is refused. The route waits
    for the delay of a leaky bucket.

    A fact is a value, or a function of the request. The limiter is that of the application's middleware unless one is
    given.
    """

    async def check(request: Request, response: Response) -> None:
        used: Any = limiter if limiter is not None else request.scope.get(LIMITER)
        if used is None:
            raise RuntimeError("limited() has no limiter: add TollkeeperMiddleware to the app, or pass limiter=…")
        known = {name: await resolved(fact(request)) if callable(fact) else fact for name, fact in facts.items()}
        decision = await used.check(known, cost)
        headers = used.headers(decision)
        if not decision.allowed:
            raise HTTPException(429 if decision.limits else 503, decision.reason, headers)
        response.headers.update(headers)
        if decision.delay:
            await asyncio.sleep(decision.delay)

    return check
