"""Middleware for WSGI applications.

>>> application = TollkeeperMiddleware(application, limiter=Limiter("tollkeeper.yaml"))
"""

from __future__ import annotations

import http
import io
import time
from types import TracebackType
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple, Type, Union

from . import _visit
from ._engine import BROKEN, MAX_BODY, TOO_LARGE, Body, raw
from ._limiter import Limiter
from ._visit import NeedsBody, Refused, Request
from ._wire import Facts

Environ = Dict[str, Any]
ExcInfo = Union[Tuple[Type[BaseException], BaseException, TracebackType], Tuple[None, None, None], None]
StartResponse = Callable[..., Callable[[bytes], object]]
App = Callable[[Environ, StartResponse], Iterable[bytes]]


class TollkeeperMiddleware:
    """Decides each request before the application sees it.

    limiter: a `Limiter`.
    facts: adds facts that only the application knows: called with the environment, returns a dict.
    cost: the cost of a request, likewise; 1 without it.
    """

    def __init__(
        self,
        app: App,
        limiter: Limiter,
        facts: Optional[Callable[[Environ], Facts]] = None,
        cost: Optional[Callable[[Environ], int]] = None,
    ) -> None:
        if not isinstance(limiter, Limiter):
            raise TypeError(f"WSGI needs a Limiter, not {type(limiter).__name__}")
        self._app = app
        self._limiter = limiter
        self._facts = facts
        self._cost = cost

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        limiter = self._limiter
        request = Request.of_environ(environ)
        own = _visit.own(
            self._facts(environ) if self._facts else None, self._cost(environ) if self._cost else None
        )
        outcome = _visit.visit(limiter, request, own)
        if isinstance(outcome, NeedsBody):
            outcome = _visit.visit(limiter, request, own, buffered(environ))
        if isinstance(outcome, Refused):
            headers = [*outcome.headers, ("content-length", str(len(outcome.body)))]
            start_response(status_line(outcome.status), headers)
            return [outcome.body]
        assert not isinstance(outcome, NeedsBody), "the body was read"
        passed = outcome

        def start(status: str, headers: List[Tuple[str, str]], exc_info: ExcInfo = None) -> Callable[[bytes], object]:
            _visit.answered(limiter, passed.ticket, int(status[:3]))
            headers = _visit.set_headers(headers, passed.headers)
            return start_response(status, headers, exc_info) if exc_info else start_response(status, headers)

        if passed.delay:
            time.sleep(passed.delay)
        if not passed.ticket:
            return self._app(environ, start)
        try:
            return Finished(self._app(environ, start), lambda: _visit.gone(limiter, passed.ticket))
        except BaseException:
            _visit.gone(limiter, passed.ticket)
            raise


class Finished:
    """A response that calls `done` when it was sent, or the client is gone."""

    def __init__(self, response: Iterable[bytes], done: Callable[[], None]) -> None:
        self._response = response
        self._done = done

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._response)

    def close(self) -> None:
        try:
            close = getattr(self._response, "close", None)
            if close is not None:
                close()
        finally:
            self._done()


def buffered(environ: Environ) -> Body:
    """Reads the body, up to what facts are read from, and lets the application read all of it."""
    length = environ.get("CONTENT_LENGTH") or None
    if length is None and "HTTP_TRANSFER_ENCODING" not in environ:
        return raw(b"")
    try:
        wanted = MAX_BODY + 1 if length is None else int(length)
    except ValueError:
        return BROKEN
    if length is not None and wanted > MAX_BODY:
        return TOO_LARGE
    stream = environ["wsgi.input"]
    content = bytearray()
    failed = False
    try:
        while len(content) < wanted:
            data = stream.read(wanted - len(content))
            if not data:
                break
            content += data
    except (OSError, ValueError):
        failed = True
    if failed or (length is not None and len(content) < wanted):
        environ["wsgi.input"] = io.BufferedReader(Replayed(bytes(content), stream))
        return BROKEN
    if len(content) > MAX_BODY:
        environ["wsgi.input"] = io.BufferedReader(Replayed(bytes(content), stream))
        return TOO_LARGE
    # Not chained: reading a body beyond its length may block.
    environ["wsgi.input"] = io.BytesIO(content)
    return raw(bytes(content))


class Replayed(io.RawIOBase):
    """Bytes that were read from a stream, then the rest of it."""

    def __init__(self, content: bytes, rest: Any) -> None:
        self._content = memoryview(content)
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._content[: len(buffer)]
        self._content = self._content[len(data) :]
        if not data:
            data = self._rest.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def status_line(status: int) -> str:
    try:
        return f"{status} {http.HTTPStatus(status).phrase}"
    except ValueError:
        return f"{status} Error"
