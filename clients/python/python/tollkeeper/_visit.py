"""What the middlewares share: how a request is shown to the limiter, and what the limiter answers.

An engine reads the facts itself from the head of the request, as the config says. A server is sent the facts `ip` and
`method`, and those of the application.
"""

from __future__ import annotations

import logging
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple, Union
from urllib.parse import quote

from . import _wire as wire
from ._decision import Decision
from ._engine import UNREAD, Body, Engine
from ._errors import TollkeeperError
from ._limiter import AsyncLimiter, Limiter
from ._wire import Facts

log = logging.getLogger("tollkeeper")

Headers = List[Tuple[str, str]]

#: Errors of a server about what it was sent, which are the client's: the facts are values of its request.
BAD_INPUT = {"invalid_fact": 400, "invalid_cost": 400, "too_many": 400, "too_large": 413}


class Request(NamedTuple):
    """A request as the web server received it."""

    method: str
    #: Path and query as the client sent them.
    target: bytes
    #: The address of the peer; empty if it is unknown.
    peer: str
    headers: List[Tuple[bytes, bytes]]

    def head(self) -> bytes:
        """The form that the engine reads."""
        lines = [self.method.encode("latin-1"), self.target, self.peer.encode()]
        for name, value in self.headers:
            lines += (name, value)
        return b"\n".join(lines)

    @staticmethod
    def of_scope(scope: Mapping[str, Any]) -> Request:
        """Reads an ASGI scope."""
        target = scope.get("raw_path") or quote(scope["path"]).encode()
        if scope.get("query_string"):
            target += b"?" + scope["query_string"]
        client = scope.get("client")
        return Request(scope.get("method", "GET"), target, client[0] if client else "", list(scope["headers"]))

    @staticmethod
    def of_environ(environ: Mapping[str, Any]) -> Request:
        """Reads a WSGI environment."""
        target = environ.get("RAW_URI") or environ.get("REQUEST_URI")
        if target is None:
            target = quote(environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", ""), encoding="latin-1")
            if environ.get("QUERY_STRING"):
                target += "?" + environ["QUERY_STRING"]
        headers = []
        for name, value in environ.items():
            if name.startswith("HTTP_"):
                name = name[5:]
            elif name not in ("CONTENT_TYPE", "CONTENT_LENGTH") or not value:
                continue
            headers.append((name.replace("_", "-").encode("latin-1"), value.encode("latin-1")))
        return Request(
            environ["REQUEST_METHOD"], target.encode("latin-1"), environ.get("REMOTE_ADDR", ""), headers
        )


class Passed(NamedTuple):
    """The request may go to the handler."""

    #: Headers for its response.
    headers: Headers
    #: Seconds to wait before the handler runs.
    delay: float
    #: The number to report the response under; 0 if no limit depends on it.
    ticket: int


class Refused(NamedTuple):
    """The response to a request that may not pass."""

    status: int
    headers: Headers
    body: bytes


class NeedsBody(NamedTuple):
    """A limit counts by a field of the body, which has to be read first."""


Outcome = Union[Passed, Refused, NeedsBody]


def visit(limiter: Limiter, request: Request, own: Mapping[str, Any], body: Body = UNREAD) -> Outcome:
    """Decides a request. `own` has the facts and the cost of the application; invalid ones raise."""
    limiter._check_open()
    if isinstance(limiter._at, Engine):
        return read(limiter._at.visit(request.head(), written(own), body))
    sent = asked(request, own)
    try:
        return judged(limiter, wire.read_decision(limiter._ask("check", sent)))
    except TollkeeperError as error:
        return failed(error)


async def visit_async(limiter: AsyncLimiter, request: Request, own: Mapping[str, Any], body: Body = UNREAD) -> Outcome:
    limiter._check_open()
    if isinstance(limiter._at, Engine):
        return read(await limiter._at.visit_async(request.head(), written(own), body))
    sent = asked(request, own)
    try:
        return judged(limiter, wire.read_decision(await limiter._ask("check", sent)))
    except TollkeeperError as error:
        return failed(error)


def answered(limiter: Union[Limiter, AsyncLimiter], ticket: int, status: int) -> None:
    """Reports the status of the response, for limits that charge or refund by it."""
    if ticket and isinstance(limiter._at, Engine):
        limiter._at.answered(ticket, status)


def gone(limiter: Union[Limiter, AsyncLimiter], ticket: int) -> None:
    """Reports that the response was sent or the client is gone, which releases slots."""
    if ticket and isinstance(limiter._at, Engine):
        limiter._at.gone(ticket)


def own(facts: Optional[Facts], cost: Optional[int]) -> Dict[str, Any]:
    """What the callbacks of the application returned."""
    given: Dict[str, Any] = {}
    if facts:
        given["facts"] = facts
    if cost is not None:
        given["cost"] = cost
    return given


def set_headers(present: Iterable[Tuple[Any, Any]], ours: Headers) -> List[Tuple[Any, Any]]:
    """The headers of a response with ours, which replace those of the same name."""
    names = {name for name, _value in ours}
    kept = [header for header in present if lower(header[0]) not in names]
    return kept + list(ours)


def lower(name: Union[str, bytes]) -> str:
    return (name.decode("latin-1") if isinstance(name, bytes) else name).lower()


def read(text: str) -> Outcome:
    """Reads what the engine answers to a visit."""
    verdict, ticket, delay, body, _decision, *lines = text.split("\n")
    headers = list(zip(lines[::2], lines[1::2]))
    if verdict == "pass":
        return Passed(headers, float(delay), int(ticket))
    if verdict == "body":
        return NeedsBody()
    if verdict == "500":
        log.error("a request was answered with 500: %s", body)
    return Refused(int(verdict), headers, body.encode())


def written(own: Mapping[str, Any]) -> str:
    if not own:
        return ""
    checked: Dict[str, Any] = {}
    if "facts" in own:
        checked["facts"] = wire.checked_facts(own["facts"])
    if "cost" in own:
        checked["cost"] = wire.checked_cost(own["cost"])
    return wire.write(checked)


def asked(request: Request, own: Mapping[str, Any]) -> Dict[str, Any]:
    """What a server is asked. Only facts that clients cannot choose are sent unless the application adds others."""
    facts: Dict[str, Any] = {"method": request.method}
    if request.peer:
        facts["ip"] = request.peer.partition("%")[0]  # without the zone of a link-local address
    facts.update(own.get("facts", {}))
    return wire.request(facts, own.get("cost", 1))


def judged(limiter: Union[Limiter, AsyncLimiter], decision: Decision) -> Outcome:
    """The outcome of a decision that a server made."""
    headers = list(limiter.headers(decision).items())
    if decision.allowed:
        return Passed(headers, decision.delay, 0)
    if not decision.limits:  # the server did not answer, and `on_unavailable` is "deny"
        return problem(503, "Service Unavailable", "the rate limiter is unavailable", headers)
    # A decision does not say which limits clients may see, so the body names no limit.
    body: Dict[str, Any] = {
        "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
        "title": "Request cannot be satisfied as assigned quota has been exceeded",
        "status": 429,
        "violated-policies": [],
    }
    if decision.retry_after is not None:
        body["retry_after"] = decision.retry_after
    return as_problem(429, body, headers)


def failed(error: TollkeeperError) -> Refused:
    """The response if there is no decision: never a pass."""
    status = BAD_INPUT.get(error.code)
    if status is None:
        log.error("a request was answered with 500: %s", error)
        return problem(500, "Internal Server Error", "the rate limiter is misconfigured", [])
    return problem(status, "Bad Request" if status == 400 else "Content Too Large", error.message, [])


def problem(status: int, title: str, detail: str, headers: Headers) -> Refused:
    return as_problem(status, {"title": title, "status": status, "detail": detail}, headers)


def as_problem(status: int, body: Mapping[str, Any], headers: Headers) -> Refused:
    content = [("content-type", "application/problem+json"), ("cache-control", "no-store")]
    return Refused(status, content + headers, wire.write(body).encode())
