"""Calls a Tollkeeper server over HTTP with the standard library only, from threads and from asyncio.

Both clients share everything but the waiting: how a request is written, how a response is read (`Response`), and when
calls are paused after failures (`Outage`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import ssl
import time
import weakref
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union
from urllib.parse import urlencode, urlsplit

from ._errors import TollkeeperError
from ._fork import ForkSafeLock
from ._wire import Answer, write

log = logging.getLogger("tollkeeper")

#: Method and path of each call.
CALLS = {
    "check": ("POST", "/v1/check"),
    "peek": ("POST", "/v1/peek"),
    "usage": ("GET", "/v1/usage"),
    "reserve": ("POST", "/v1/reserve"),
    "settle": ("POST", "/v1/settle"),
    "refund": ("POST", "/v1/refund"),
    "acquire": ("POST", "/v1/acquire"),
    "release": ("POST", "/v1/release"),
    "renew": ("POST", "/v1/renew"),
    "forget": ("DELETE", "/v1/state"),
    "explain": ("POST", "/v1/explain"),
    "limits": ("GET", "/v1/limits"),
}

#: Calls that `on_unavailable` decides while the server does not answer.
DECIDES = ("check", "peek", "reserve", "acquire")
#: The most idle connections that a client keeps.
MAX_IDLE = 32
#: The largest response that is read; answers of a server have some kilobytes.
MAX_RESPONSE = 4 * 1024 * 1024


class Unavailable(Exception):
    """The server did not answer in time, or with a 5xx."""


class Endpoint:
    """A server: its address, and how requests to it are written."""

    def __init__(self, url: str, token: Optional[str]) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise TollkeeperError(
                "invalid_config", f"the server `{url}` is not a URL such as http://127.0.0.1:8080", "server"
            )
        if parts.username or parts.password or parts.query or parts.fragment:
            raise TollkeeperError(
                "invalid_config", "the URL of the server has only scheme, host, port and path; use token=…", "server"
            )
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/")
        head = f"Host: {parts.netloc}\r\nUser-Agent: tollkeeper-python\r\n"
        if token is not None:
            if not token.isascii() or not token.isprintable():
                raise TollkeeperError("invalid_config", "the token has characters that no header can carry", "token")
            head += f"Authorization: Bearer {token}\r\n"
        self._head = head

    def request(self, verb: str, body: Mapping[str, Any]) -> bytes:
        method, path = CALLS[verb]
        content = b""
        if method == "POST":
            content = write(body).encode()
        else:
            # Pairs, because a fact may have the name `limit`, too.
            query = [("limit", body["limit"])] if "limit" in body else []
            query += [(name, as_text(value)) for name, value in body.get("facts", {}).items()]
            path += f"?{urlencode(query)}" if query else ""
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(content)}\r\n\r\n"
        return head.encode() + content


def as_text(value: Union[str, int, bool]) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


class Response:
    """Reads one HTTP/1.1 response from pieces of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._size = 0
        self._body = bytearray()
        self._left: Optional[int] = None
        self._chunked = False
        self._in_head = True
        self._status = 0
        self._headers: Dict[str, str] = {}
        #: Whether the response is complete.
        self.complete = False
        #: Whether the connection can be used again.
        self.keep = True

    def feed(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > MAX_RESPONSE:
            raise Unavailable("the response is too large")
        self._buffer += data
        while self._in_head:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._buffer[:end])
            del self._buffer[: end + 4]
            self._read_head(head.decode("latin-1").split("\r\n"))
        if self._chunked:
            self._read_chunks()
        elif self._left is not None:
            self._body += self._buffer
            self._buffer.clear()
            if len(self._body) > self._left:
                raise Unavailable("more bytes than the response announced")
            self.complete = len(self._body) == self._left
        else:
            self._body += self._buffer
            self._buffer.clear()

    def end(self) -> None:
        """The server closed the connection."""
        self.keep = False
        if self._in_head or self._chunked or self._left is not None:
            raise ConnectionError("the server closed the connection before it answered completely")
        self.complete = True

    def answer(self) -> Answer:
        return Answer(self._status, self._body.decode(errors="replace"), self._headers)

    def _read_head(self, lines: List[str]) -> None:
        version, _, rest = lines[0].partition(" ")
        if version not in ("HTTP/1.1", "HTTP/1.0") or not rest[:3].isdigit():
            raise Unavailable(f"not an HTTP response: {lines[0][:40]!r}")
        self._status = int(rest[:3])
        if self._status < 200:  # 100 Continue: the response follows
            return
        self._in_head = False
        headers = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        self.keep = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
        self._chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        length = headers.get("content-length")
        if not self._chunked and length is not None:
            if not length.isdigit():
                raise Unavailable(f"Content-Length: {length[:40]}")
            self._left = int(length)
        shown = ("ratelimit", "x-ratelimit", "retry-after")
        self._headers = {name: value for name, value in headers.items() if name.startswith(shown)}

    def _read_chunks(self) -> None:
        while not self.complete:
            end = self._buffer.find(b"\r\n")
            if end < 0:
                return
            try:
                size = int(bytes(self._buffer[:end]).split(b";")[0], 16)
            except ValueError:
                raise Unavailable("a chunk without its size") from None
            if len(self._buffer) < end + 2 + size + 2:
                return
            self._body += self._buffer[end + 2 : end + 2 + size]
            del self._buffer[: end + 2 + size + 2]
            self.complete = size == 0


class Outage:
    """Pauses calls to a server for a second after five failures in a row, so that not every request waits for it."""

    FAILURES = 5
    PAUSE = 1.0

    def __init__(self, url: str) -> None:
        self._url = url
        self._failures = 0
        self._paused_until = 0.0
        self._log_again = 0.0

    def pass_or_raise(self) -> None:
        if self._failures >= self.FAILURES and time.monotonic() < self._paused_until:
            raise Unavailable(f"calls are paused for a second after {self._failures} failures in a row")

    def worked(self) -> None:
        self._failures = 0

    def failed(self, problem: object) -> None:
        self._failures += 1
        now = time.monotonic()
        self._paused_until = now + self.PAUSE
        if now >= self._log_again:  # at most one line a second
            self._log_again = now + 1
            log.error("the tollkeeper server %s did not answer: %s", self._url, problem)


def available(verb: str, answer: Answer) -> Answer:
    """An answer of a server that works. Only a call that `on_unavailable` does not decide shows an error of its store."""
    shows_error = verb not in DECIDES and '"store_unavailable"' in answer.text
    if answer.status >= 500 and not shows_error:
        raise Unavailable(f"status {answer.status}")
    return answer


def described(error: BaseException) -> str:
    return str(error) or type(error).__name__


class SyncClient:
    """Calls a server from threads. Each call takes an idle connection or opens one."""

    def __init__(self, url: str, token: Optional[str], timeout: float) -> None:
        self._endpoint = Endpoint(url, token)
        self._timeout = timeout
        self._outage = Outage(url)
        self._lock = ForkSafeLock()
        self._idle: List[socket.socket] = []
        self._process = os.getpid()

    def ask(self, verb: str, body: Mapping[str, Any]) -> Answer:
        self._outage.pass_or_raise()
        request = self._endpoint.request(verb, body)
        deadline = time.monotonic() + self._timeout
        try:
            answer = available(verb, self._exchange(request, deadline).answer())
        except (OSError, Unavailable) as error:
            self._outage.failed(described(error))
            raise Unavailable(described(error)) from error
        self._outage.worked()
        return answer

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _exchange(self, request: bytes, deadline: float) -> Response:
        # A call whose connection breaks is not sent again: the server may have charged it.
        connection = self._take() or self._connect(deadline)
        return self._talk(connection, request, Response(), deadline)

    def _talk(self, connection: socket.socket, request: bytes, response: Response, deadline: float) -> Response:
        try:
            connection.settimeout(left(deadline))
            connection.sendall(request)
            while not response.complete:
                connection.settimeout(left(deadline))
                data = connection.recv(65536)
                if data:
                    response.feed(data)
                else:
                    response.end()
        except BaseException:
            connection.close()
            raise
        self._give(connection, response.keep)
        return response

    def _connect(self, deadline: float) -> socket.socket:
        endpoint = self._endpoint
        connection = socket.create_connection((endpoint.host, endpoint.port), left(deadline))
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if endpoint.tls is not None:
                connection.settimeout(left(deadline))
                connection = endpoint.tls.wrap_socket(connection, server_hostname=endpoint.host)
        except BaseException:
            connection.close()
            raise
        return connection

    def _take(self) -> Optional[socket.socket]:
        with self._lock:
            if self._process != os.getpid():  # after a fork, the connections are the parent's
                self._process, self._idle = os.getpid(), []
            while self._idle:
                connection = self._idle.pop()
                if is_idle(connection):
                    return connection
                connection.close()
        return None

    def _give(self, connection: socket.socket, keep: bool) -> None:
        with self._lock:
            if keep and len(self._idle) < MAX_IDLE and self._process == os.getpid():
                self._idle.append(connection)
                return
        connection.close()


def is_idle(connection: socket.socket) -> bool:
    """Whether nothing has arrived. A server sends nothing without a request, so what arrives is the end."""
    readable = select.poll()  # unlike `select.select`, it takes descriptors above 1023
    readable.register(connection, select.POLLIN)
    return not readable.poll(0)


def left(deadline: float) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise socket.timeout("timed out")
    return seconds


Stream = Tuple[asyncio.StreamReader, asyncio.StreamWriter]


class AsyncClient:
    """Calls a server from asyncio. Connections belong to the event loop that opened them."""

    def __init__(self, url: str, token: Optional[str], timeout: float) -> None:
        self._endpoint = Endpoint(url, token)
        self._timeout = timeout
        self._outage = Outage(url)
        self._idle: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, List[Stream]]" = weakref.WeakKeyDictionary()

    async def ask(self, verb: str, body: Mapping[str, Any]) -> Answer:
        self._outage.pass_or_raise()
        request = self._endpoint.request(verb, body)
        try:
            answer = available(verb, (await asyncio.wait_for(self._exchange(request), self._timeout)).answer())
        except asyncio.TimeoutError:
            self._outage.failed("timed out")
            raise Unavailable("timed out") from None
        except (OSError, Unavailable) as error:
            self._outage.failed(described(error))
            raise Unavailable(described(error)) from error
        self._outage.worked()
        return answer

    async def close(self) -> None:
        for _reader, writer in self._idle.pop(asyncio.get_running_loop(), []):
            writer.close()

    async def _exchange(self, request: bytes) -> Response:
        idle = self._idle.setdefault(asyncio.get_running_loop(), [])
        while idle:
            stream = idle.pop()
            if stream[0].at_eof() or stream[1].is_closing():
                stream[1].close()
                continue
            return await self._talk(stream, idle, request, Response())
        endpoint = self._endpoint
        stream = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=endpoint.tls)
        return await self._talk(stream, idle, request, Response())

    @staticmethod
    async def _talk(stream: Stream, idle: List[Stream], request: bytes, response: Response) -> Response:
        reader, writer = stream
        try:
            writer.write(request)
            await writer.drain()
            while not response.complete:
                data = await reader.read(65536)
                if data:
                    response.feed(data)
                else:
                    response.end()
        except BaseException:
            writer.close()
            raise
        if response.keep and len(idle) < MAX_IDLE:
            idle.append(stream)
        else:
            writer.close()
        return response
