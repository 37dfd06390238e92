"""Middleware for ASGI applications: Starlette, FastAPI, Litestar, Quart.

>>> app.add_middleware(TollkeeperMiddleware, limiter=AsyncLimiter("tollkeeper.yaml"))
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any, Awaitable, Callable, Iterable, List, MutableMapping, Optional, Tuple, Union

from . import _visit
from ._engine import BROKEN, MAX_BODY, TOO_LARGE, Body, raw
from ._limiter import AsyncLimiter
from ._visit import NeedsBody, Passed, Refused, Request
from ._wire import Facts

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Text = Union[str, bytes]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Where handlers and dependencies find the limiter in the scope.
LIMITER = "tollkeeper.limiter"


class TollkeeperMiddleware:
    """Decides each HTTP request and each WebSocket handshake before the application sees it.

    limiter: an `AsyncLimiter`.
    facts: adds facts that only the application knows: called with the scope, returns a dict; may be a coroutine.
    cost: the cost of a request, likewise; 1 without it.
    """

    def __init__(
        self,
        app: App,
        limiter: AsyncLimiter,
        facts: Optional[Callable[[Scope], Union[Facts, Awaitable[Facts]]]] = None,
        cost: Optional[Callable[[Scope], Union[int, Awaitable[int]]]] = None,
    ) -> None:
        if not isinstance(limiter, AsyncLimiter):
            raise TypeError(f"ASGI needs an AsyncLimiter, not {type(limiter).__name__}: a Limiter would block the event loop")
        self._app = app
        self._limiter = limiter
        self._facts = facts
        self._cost = cost

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        scope[LIMITER] = self._limiter
        request = Request.of_scope(scope)
        facts = await resolved(self._facts(scope)) if self._facts else None
        own = _visit.own(facts, await resolved(self._cost(scope)) if self._cost else None)
        outcome = await _visit.visit_async(self._limiter, request, own)
        if isinstance(outcome, NeedsBody):
            messages, body = await buffered(receive)
            outcome = await _visit.visit_async(self._limiter, request, own, body)
            receive = replayed(messages, receive)
        if isinstance(outcome, Refused):
            await refuse(scope, receive, send, outcome)
        elif isinstance(outcome, Passed):
            await self._pass(scope, receive, send, outcome)

    async def _pass(self, scope: Scope, receive: Receive, send: Send, passed: Passed) -> None:
        async def send_with_headers(message: Message) -> None:
            kind = message["type"]
            if kind in ("http.response.start", "websocket.accept", "websocket.http.response.start"):
                merged = _visit.set_headers(message.get("headers") or (), passed.headers)
                message["headers"] = encoded(merged)
                _visit.answered(self._limiter, passed.ticket, message.get("status", 101))
            await send(message)

        try:
            if passed.delay:
                await asyncio.sleep(passed.delay)
            await self._app(scope, receive, send_with_headers)
        finally:
            _visit.gone(self._limiter, passed.ticket)


async def resolved(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def encoded(headers: Iterable[Tuple[Text, Text]]) -> List[Tuple[bytes, bytes]]:
    def encode(text: Text) -> bytes:
        return text.encode("latin-1") if isinstance(text, str) else text

    return [(encode(name), encode(value)) for name, value in headers]


async def buffered(receive: Receive) -> Tuple[List[Message], Body]:
    """Reads the body, up to what facts are read from; returns the messages to replay."""
    messages: List[Message] = []
    content = bytearray()
    while True:
        message = await receive()
        messages.append(message)
        if message["type"] != "http.request":
            return messages, BROKEN
        content += message.get("body", b"")
        if len(content) > MAX_BODY:
            return messages, TOO_LARGE
        if not message.get("more_body"):
            return messages, raw(bytes(content))


def replayed(messages: List[Message], receive: Receive) -> Receive:
    waiting = iter(messages)

    async def next_message() -> Message:
        message = next(waiting, None)
        return await receive() if message is None else message

    return next_message


async def refuse(scope: Scope, receive: Receive, send: Send, refused: Refused) -> None:
    headers = encoded(refused.headers)
    kind = "http.response"
    if scope["type"] == "websocket":
        if "websocket.http.response" not in scope.get("extensions", {}):
            # Without the extension, a server can only say 403.
            await receive()
            await send({"type": "websocket.close", "code": 1013, "reason": "rate limited"})
            return
        kind = "websocket.http.response"
    else:
        headers.append((b"content-length", str(len(refused.body)).encode()))
    await send({"type": f"{kind}.start", "status": refused.status, "headers": headers})
    await send({"type": f"{kind}.body", "body": refused.body})
