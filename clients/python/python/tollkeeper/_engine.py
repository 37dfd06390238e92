"""The engine in this process: loads the extension on first use, and translates between it and Python."""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import weakref
from types import ModuleType
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple, Union

from ._decision import Source
from ._errors import TollkeeperError
from ._wire import Answer, Facts, write

log = logging.getLogger("tollkeeper")

NOT_BUILT = (
    "the engine is not built: run `pip install ./clients/python` in the repository "
    "(needs Rust, https://rustup.rs), or use server=…"
)

_native: Optional[ModuleType] = None


def native() -> Any:
    """The extension. Only what opens an engine calls this: a client of a server works without it."""
    global _native
    if _native is None:
        try:
            from . import _native as extension  # type: ignore[attr-defined]
        except ImportError as error:
            raise TollkeeperError("not_built", f"{NOT_BUILT} ({error})") from error
        # A forked process has none of the engine's threads: it opens its own at its next call.
        os.register_at_fork(after_in_child=extension.forked)
        atexit.register(extension.ending)
        _native = extension
    return _native


def report(kind: str, message: str) -> None:
    """Logs an event of the engine, which calls this from its threads."""
    levels = {"error": logging.ERROR, "warning": logging.WARNING}
    log.log(levels.get(kind, logging.INFO), "policy version %s is active" if kind == "reload" else "%s", message)


#: The arguments of a `Decision` for the number of an engine, facts and cost.
CheckNow = Callable[[int, Facts, int], Optional[Tuple[bool, Source]]]


def check_never(number: int, facts: Facts, cost: int) -> None:
    """The `check_now` of limiters whose checks wait for Redis or a server: leaves every check to `ask`."""


class Engine:
    """An engine, by its number."""

    def __init__(
        self,
        *,
        config: Union[str, "os.PathLike[str]", None],
        limits: Optional[Sequence[Mapping[str, Any]]] = None,
        store: Optional[str] = None,
        name: Optional[str] = None,
        at: Optional[float] = None,
        settings: Optional[Mapping[str, Any]] = None,
    ) -> None:
        text = None if limits is None else as_config({"limits": limits, **(settings or {})})
        path = None if config is None else os.fspath(config)
        self._native = native()
        try:
            self.number: int = self._native.open(path, text, store, name, at, report)
        except ValueError as error:
            raise TollkeeperError("invalid_config", str(error)) from None
        #: Whether its store is reached over the network.
        self.is_remote: bool = self._native.is_remote(self.number)
        #: Decides plain facts in the memory store without JSON; returns `None` for what only `ask` can answer.
        self.check_now: CheckNow = check_never if self.is_remote else self._native.check

    def close(self) -> None:
        self._native.close(self.number)

    def __del__(self) -> None:
        # Not if it could not be opened.
        if hasattr(self, "number"):
            self.close()

    def advance(self, seconds: float) -> None:
        try:
            self._native.advance(self.number, seconds)
        except ValueError as error:
            raise TollkeeperError("invalid_time", str(error)) from None

    def ask(self, verb: str, body: Mapping[str, Any]) -> Answer:
        """Calls the engine; waits for Redis without the GIL."""
        return read_answer(self._native.ask(self.number, verb, write(body)))

    async def ask_async(self, verb: str, body: Mapping[str, Any]) -> Answer:
        text = write(body)
        if not self.is_remote:
            return read_answer(self._native.ask(self.number, verb, text))
        return read_answer(await Mailbox.of_this_loop(self._native).ask(self.number, verb, text))

    def visit(self, head: bytes, own: str, body: "Body") -> str:
        """Decides a request by its head, as the middleware does."""
        text: str = self._native.visit(self.number, head, own, *body)
        return text

    async def visit_async(self, head: bytes, own: str, body: "Body") -> str:
        if not self.is_remote:
            return self.visit(head, own, body)
        answer = Mailbox.of_this_loop(self._native).visit(self.number, head, own, body, self._end)
        try:
            return await answer
        except asyncio.CancelledError:
            if not answer.cancelled():  # it was there already, and its caller had not run yet
                self._end(answer.result())
            raise

    def _end(self, text: str) -> None:
        """Ends a visit whose caller was cancelled while it waited."""
        ticket = int(text.split("\n", 2)[1])
        if ticket:
            self.gone(ticket)

    def answered(self, ticket: int, status: int) -> None:
        self._native.answered(self.number, ticket, status)

    def gone(self, ticket: int) -> None:
        self._native.gone(self.number, ticket)


#: The body of a request as the engine takes it: how far it was read, and the bytes.
Body = Tuple[str, bytes]
UNREAD: Body = ("unread", b"")
TOO_LARGE: Body = ("too_large", b"")
BROKEN: Body = ("broken", b"")
#: The largest body that facts are read from.
MAX_BODY = 64 * 1024


def raw(body: bytes) -> Body:
    return TOO_LARGE if len(body) > MAX_BODY else ("raw", body)


def as_config(settings: Mapping[str, Any]) -> str:
    try:
        return json.dumps(settings)
    except (TypeError, ValueError) as error:
        raise TollkeeperError("invalid_config", f"the limits are not plain values: {error}", "limits") from None


def read_answer(answered: Tuple[int, str, str]) -> Answer:
    status, text, headers = answered
    return Answer(status, text, as_headers(headers))


def as_headers(lines: str) -> Dict[str, str]:
    """Headers from `name\\nvalue\\nname\\nvalue`."""
    parts = lines.split("\n") if lines else []
    return dict(zip(parts[::2], parts[1::2]))


class Mailbox:
    """Answers of the engine's threads for one event loop.

    The threads append to a list and make a socket readable, once for all answers that are waiting, so that a busy loop
    wakes up once for many of them and no thread of the engine waits for the GIL.
    """

    _of_loops: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox]" = weakref.WeakKeyDictionary()

    @staticmethod
    def of_this_loop(extension: Any) -> Mailbox:
        loop = asyncio.get_running_loop()
        mailbox = Mailbox._of_loops.get(loop)
        if mailbox is None:
            mailbox = Mailbox._of_loops[loop] = Mailbox(extension, loop)
        return mailbox

    def __init__(self, extension: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._mail = extension.Mailbox()
        #: The futures of calls, and what to do with an answer that no caller waits for any more.
        self._futures: Dict[int, Tuple[asyncio.Future[Any], Callable[[Any], None]]] = {}
        self._next = 0
        loop.add_reader(self._mail.fileno(), self._deliver)

    def ask(self, number: int, verb: str, text: str) -> "asyncio.Future[Tuple[int, str, str]]":
        future = self._expect()
        self._mail.ask(number, verb, text, self._next)
        return future

    def visit(
        self, number: int, head: bytes, own: str, body: Body, cancelled: Callable[[str], None]
    ) -> "asyncio.Future[str]":
        future = self._expect(cancelled)
        self._mail.visit(number, head, own, *body, self._next)
        return future

    def _expect(self, cancelled: Callable[[Any], None] = lambda answer: None) -> "asyncio.Future[Any]":
        self._next += 1
        future: "asyncio.Future[Any]" = asyncio.get_running_loop().create_future()
        self._futures[self._next] = (future, cancelled)
        return future

    def _deliver(self) -> None:
        for call, answer in self._mail.take():
            future, cancelled = self._futures.pop(call)
            if future.done():
                cancelled(answer)
            else:
                future.set_result(answer)
