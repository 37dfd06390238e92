"""`Limiter` and `AsyncLimiter`: one interface to an engine in this process and to a server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from types import TracebackType
from typing import Any, Dict, Generator, Generic, Iterator, List, Mapping, Optional, Sequence, Type, TypeVar, Union

from . import _wire as wire
from ._decision import Decision, LimitState
from ._engine import Engine, check_never
from ._errors import TollkeeperError
from ._http import DECIDES, AsyncClient, SyncClient, Unavailable
from ._wire import Answer, Facts

Config = Union[str, "os.PathLike[str]"]
Limits = Sequence[Mapping[str, Any]]
Client = TypeVar("Client", SyncClient, AsyncClient)
Self = TypeVar("Self", bound="_Base[Any]")

log = logging.getLogger("tollkeeper")


class _Server(Generic[Client]):
    """A server, and what to do while it does not answer."""

    def __init__(self, client: Client, on_unavailable: str) -> None:
        self.client: Client = client
        self.on_unavailable = on_unavailable

    def instead(self, verb: str, unavailable: Unavailable) -> Answer:
        """The answer to a call that the server did not answer; operations without a policy for this case raise."""
        if verb not in DECIDES:
            raise TollkeeperError("unavailable", f"the server did not answer: {unavailable}") from unavailable
        allowed = self.on_unavailable == "allow"
        decision: Dict[str, Any] = {
            "allowed": allowed,
            "binding": None,
            "retry_after": None if allowed else 1.0,
            "delay": 0,
            "degraded": self.on_unavailable,
            "charge": None,
            "limits": [],
        }
        if not allowed:
            decision["reason"] = f"the limiter is unavailable ({unavailable})"
        if verb == "acquire":
            decision["slot"] = None
        headers = {} if allowed else {"retry-after": "1"}
        return Answer(200 if allowed else 429, wire.write(decision), headers)


def _choose(
    client: Type[Client],
    config: Optional[Config],
    limits: Optional[Limits],
    store: Optional[str],
    name: Optional[str],
    server: Optional[str],
    token: Optional[str],
    timeout: float,
    on_unavailable: str,
    settings: Mapping[str, Any],
) -> Union[Engine, _Server[Client]]:
    """Opens what the arguments ask for."""
    if (config is not None) + (limits is not None) + (server is not None) != 1:
        raise TypeError("a limiter takes one of: a config file, limits=[…] or server=…")
    if server is not None:
        if store is not None or name is not None or settings:
            raise TypeError("store, name and settings belong to the server's own config: leave them out with server=…")
        if on_unavailable not in ("allow", "deny"):
            raise TypeError(f'on_unavailable is "allow" or "deny", not {on_unavailable!r}')
        if not timeout > 0:
            raise TypeError(f"timeout is a number of seconds above 0, not {timeout!r}")
        return _Server(client(server, token, timeout), on_unavailable)
    if token is not None:
        raise TypeError("token belongs to server=…")
    if config is not None and settings:
        raise TypeError(f"{', '.join(settings)}: write settings into the config file, or pass limits=[…]")
    return Engine(config=config, limits=limits, store=store, name=name, settings=settings)


class _Base(Generic[Client]):
    """What both limiters have in common."""

    #: The class of clients of a server.
    _client: Type[Any]
    _at: Union[Engine, _Server[Client]]
    _closed = False

    def __init__(
        self,
        config: Optional[Config] = None,
        *,
        limits: Optional[Limits] = None,
        store: Optional[str] = None,
        name: Optional[str] = None,
        server: Optional[str] = None,
        token: Optional[str] = None,
        timeout: float = 0.2,
        on_unavailable: str = "allow",
        **settings: Any,
    ) -> None:
        self._prepare(
            _choose(self._client, config, limits, store, name, server, token, timeout, on_unavailable, settings)
        )

    @classmethod
    def _of(cls: Type[Self], engine: Engine) -> Self:
        limiter = cls.__new__(cls)
        limiter._prepare(engine)
        return limiter

    def _prepare(self, at: Union[Engine, _Server[Client]]) -> None:
        """Keeps what `check` needs for a memory store at hand."""
        self._at = at
        self._check_now = at.check_now if isinstance(at, Engine) else check_never
        self._number = at.number if isinstance(at, Engine) else 0

    def _check_open(self) -> None:
        if self._closed:
            raise TollkeeperError("closed", "the limiter is closed")

    def headers(self, decision: Decision) -> Dict[str, str]:
        """The rate-limit headers for the response to a request with this decision, in the dialects of the config."""
        return dict(decision._source.headers())


def _wait(decision: Decision, deadline: Optional[float]) -> Optional[float]:
    """Seconds to wait before the next try of `until_allowed`; `None` to give up or go on with this decision."""
    wait = decision.retry_after
    if decision.allowed or wait is None or (deadline is not None and time.monotonic() + wait > deadline):
        return None
    return wait


@contextlib.contextmanager
def _reported_if_lost() -> Iterator[None]:
    """Logs that a slot cannot be released at the end of its block. It ends with its ttl, and the work has succeeded."""
    try:
        yield
    except TollkeeperError as error:
        if error.code not in ("unavailable", "store_unavailable"):
            raise
        log.error("a slot is not released, and ends after its ttl: %s", error)


class Limiter(_Base[SyncClient]):
    """Decides requests by the limits of a config file, of the code, or of a server.

    >>> limiter = Limiter("tollkeeper.yaml")                                   # in this process; follows the file
    >>> limiter = Limiter(limits=[{"name": "per-user", "by": "user", "rate": "100/min"}], store="redis://127.0.0.1/")
    >>> limiter = Limiter(server="http://127.0.0.1:8080")
    >>> limiter.check({"user": "alice"}).allowed
    True

    It can be used from any thread, and after a fork.

    config: the config file; every change of it applies within a second.
    limits: limits in the shape of the config file; `settings` are its other keys, such as `headers` and `http`.
    store: `memory://` (counts of this process) or `redis://…` (shared), instead of the store of the config.
    name: limiters with the same name share one memory store in this process.
    server: the URL of a Tollkeeper server. It is asked with `token`, for at most `timeout` seconds; while it does not
        answer, `on_unavailable` ("allow" or "deny") decides.
    """

    _client = SyncClient

    def check(self, facts: Facts, cost: int = 1) -> Decision:
        """Decides a request, and charges it if it is admitted."""
        decided = self._check_now(self._number, facts, cost)
        if decided is not None:
            return Decision(*decided)
        return wire.read_decision(self._ask("check", wire.request(facts, cost)))

    def peek(self, facts: Facts, cost: int = 1) -> Decision:
        """Decides as `check` would, and charges nothing."""
        return wire.read_decision(self._ask("peek", wire.request(facts, cost)))

    def usage(self, facts: Facts) -> List[LimitState]:
        """What is left of each limit that applies."""
        return wire.read_states(self._ask("usage", {"facts": wire.checked_facts(facts)}))

    def reserve(self, facts: Facts, cost: int = 1, *, ttl: float = 60) -> Decision:
        """Charges an estimate, which `settle` corrects within `ttl` seconds."""
        return wire.read_decision(self._ask("reserve", wire.reservation(facts, cost, ttl)))

    def settle(self, charge: str, cost: Optional[int] = None, *, facts: Optional[Facts] = None) -> bool:
        """Corrects a charge to what was used: `facts` for limits with that `cost:` fact, `cost` for the others."""
        return wire.read_done(self._ask("settle", wire.correction(charge, cost, facts)))

    def refund(self, charge: str, cost: Optional[int] = None, *, facts: Optional[Facts] = None) -> bool:
        """Gives a charge back, or a part of it; `False` if that was done already."""
        return wire.read_done(self._ask("refund", wire.correction(charge, cost, facts)))

    def forget(self, limit: str, facts: Facts) -> bool:
        """Forgets one key of a limit; `False` if nothing was stored. A server needs its admin token for this."""
        return wire.read_done(self._ask("forget", {"limit": limit, "facts": wire.checked_facts(facts)}))

    def explain(self, facts: Facts) -> List[Dict[str, Any]]:
        """For every limit, whether it applies to a request with these facts, and why. Decides nothing."""
        answer = self._ask("explain", {"facts": wire.checked_facts(facts)})
        limits: List[Dict[str, Any]] = wire.read_object(answer, (200,))["limits"]
        return limits

    def policy(self) -> Dict[str, Any]:
        """The active limits: `{"version": …, "source": …, "limits": […]}`."""
        return wire.read_object(self._ask("limits", {}), (200,))

    def until_allowed(self, facts: Facts, cost: int = 1, *, timeout: Optional[float] = None) -> Decision:
        """Waits until the request is admitted. Returns a refusal if no retry can pass within `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            decision = self.check(facts, cost)
            wait = _wait(decision, deadline)
            if wait is None:
                return decision
            time.sleep(wait)

    def acquire(self, facts: Facts, cost: int = 1) -> Held:
        """Takes a slot of the concurrency limits, and charges the others.

        >>> with limiter.acquire({"user": "alice"}) as held:
        ...     if held.decision.allowed: export()
        """
        answer = self._ask("acquire", wire.request(facts, cost))
        return Held(self, wire.read_decision(answer))

    def close(self) -> None:
        """Closes it; later calls raise `closed`. A second close does nothing."""
        if not self._closed:
            self._closed = True
            (self._at if isinstance(self._at, Engine) else self._at.client).close()

    def __enter__(self) -> Limiter:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    def _ask(self, verb: str, body: Mapping[str, Any]) -> Answer:
        self._check_open()
        if isinstance(self._at, Engine):
            return self._at.ask(verb, body)
        try:
            return self._at.client.ask(verb, body)
        except Unavailable as error:
            return self._at.instead(verb, error)


class Held:
    """A slot of the concurrency limits, held until `release` or the end of a `with` block."""

    __slots__ = ("_limiter", "decision", "slot")

    #: The decision. If it refused the request, there is no slot.
    decision: Decision
    #: The slot as the HTTP API names it; `None` if no concurrency limit applied, or the request was refused.
    slot: Optional[str]

    def __init__(self, limiter: Limiter, decision: Decision) -> None:
        self._limiter = limiter
        self.decision = decision
        self.slot = decision.to_dict().get("slot")

    def release(self) -> bool:
        """Releases the slot; `False` if there is none, or it was released or has expired."""
        if self.slot is None:
            return False
        return wire.read_done(self._limiter._ask("release", {"slot": self.slot}), false_if="unknown_slot")

    def renew(self) -> bool:
        """Starts the limit's `ttl` anew, for work that takes longer; `False` if the slot is no longer held."""
        if self.slot is None:
            return False
        return wire.read_done(self._limiter._ask("renew", {"slot": self.slot}), false_if="unknown_slot")

    def __bool__(self) -> bool:
        return self.decision.allowed

    def __enter__(self) -> Held:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        with _reported_if_lost():
            self.release()


class AsyncLimiter(_Base[AsyncClient]):
    """`Limiter` for asyncio: the same arguments and methods, awaited. It never blocks the event loop."""

    _client = AsyncClient

    async def check(self, facts: Facts, cost: int = 1) -> Decision:
        """Decides a request, and charges it if it is admitted."""
        decided = self._check_now(self._number, facts, cost)
        if decided is not None:
            return Decision(*decided)
        return wire.read_decision(await self._ask("check", wire.request(facts, cost)))

    async def peek(self, facts: Facts, cost: int = 1) -> Decision:
        """Decides as `check` would, and charges nothing."""
        return wire.read_decision(await self._ask("peek", wire.request(facts, cost)))

    async def usage(self, facts: Facts) -> List[LimitState]:
        """What is left of each limit that applies."""
        return wire.read_states(await self._ask("usage", {"facts": wire.checked_facts(facts)}))

    async def reserve(self, facts: Facts, cost: int = 1, *, ttl: float = 60) -> Decision:
        """Charges an estimate, which `settle` corrects within `ttl` seconds."""
        return wire.read_decision(await self._ask("reserve", wire.reservation(facts, cost, ttl)))

    async def settle(self, charge: str, cost: Optional[int] = None, *, facts: Optional[Facts] = None) -> bool:
        """Corrects a charge to what was used: `facts` for limits with that `cost:` fact, `cost` for the others."""
        return wire.read_done(await self._ask("settle", wire.correction(charge, cost, facts)))

    async def refund(self, charge: str, cost: Optional[int] = None, *, facts: Optional[Facts] = None) -> bool:
        """Gives a charge back, or a part of it; `False` if that was done already."""
        return wire.read_done(await self._ask("refund", wire.correction(charge, cost, facts)))

    async def forget(self, limit: str, facts: Facts) -> bool:
        """Forgets one key of a limit; `False` if nothing was stored. A server needs its admin token for this."""
        return wire.read_done(await self._ask("forget", {"limit": limit, "facts": wire.checked_facts(facts)}))

    async def explain(self, facts: Facts) -> List[Dict[str, Any]]:
        """For every limit, whether it applies to a request with these facts, and why. Decides nothing."""
        answer = await self._ask("explain", {"facts": wire.checked_facts(facts)})
        limits: List[Dict[str, Any]] = wire.read_object(answer, (200,))["limits"]
        return limits

    async def policy(self) -> Dict[str, Any]:
        """The active limits: `{"version": …, "source": …, "limits": […]}`."""
        return wire.read_object(await self._ask("limits", {}), (200,))

    async def until_allowed(self, facts: Facts, cost: int = 1, *, timeout: Optional[float] = None) -> Decision:
        """Waits until the request is admitted. Returns a refusal if no retry can pass within `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            decision = await self.check(facts, cost)
            wait = _wait(decision, deadline)
            if wait is None:
                return decision
            await asyncio.sleep(wait)

    def acquire(self, facts: Facts, cost: int = 1) -> Acquiring:
        """Takes a slot of the concurrency limits, and charges the others: awaited, or with `async with`.

        >>> async with limiter.acquire({"user": "alice"}) as held:
        ...     if held.decision.allowed: await export()
        """
        return Acquiring(self, wire.request(facts, cost))

    async def close(self) -> None:
        """Closes it; later calls raise `closed`. A second close does nothing."""
        if not self._closed:
            self._closed = True
            if isinstance(self._at, Engine):
                self._at.close()
            else:
                await self._at.client.close()

    async def __aenter__(self) -> AsyncLimiter:
        return self

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        await self.close()

    async def _ask(self, verb: str, body: Mapping[str, Any]) -> Answer:
        self._check_open()
        if isinstance(self._at, Engine):
            return await self._at.ask_async(verb, body)
        try:
            return await self._at.client.ask(verb, body)
        except Unavailable as error:
            return self._at.instead(verb, error)


class Acquiring:
    """A slot that is being taken."""

    __slots__ = ("_held", "_limiter", "_request")

    def __init__(self, limiter: AsyncLimiter, request: Mapping[str, Any]) -> None:
        self._limiter = limiter
        self._request = request

    def __await__(self) -> Generator[Any, None, AsyncHeld]:
        return self._take().__await__()

    async def __aenter__(self) -> AsyncHeld:
        self._held = await self._take()
        return self._held

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        with _reported_if_lost():
            await self._held.release()

    async def _take(self) -> AsyncHeld:
        answer = await self._limiter._ask("acquire", self._request)
        return AsyncHeld(self._limiter, wire.read_decision(answer))


class AsyncHeld:
    """A slot of the concurrency limits, held until `release` or the end of an `async with` block."""

    __slots__ = ("_limiter", "decision", "slot")

    #: The decision. If it refused the request, there is no slot.
    decision: Decision
    #: The slot as the HTTP API names it; `None` if no concurrency limit applied, or the request was refused.
    slot: Optional[str]

    def __init__(self, limiter: AsyncLimiter, decision: Decision) -> None:
        self._limiter = limiter
        self.decision = decision
        self.slot = decision.to_dict().get("slot")

    async def release(self) -> bool:
        """Releases the slot; `False` if there is none, or it was released or has expired."""
        if self.slot is None:
            return False
        return wire.read_done(await self._limiter._ask("release", {"slot": self.slot}), false_if="unknown_slot")

    async def renew(self) -> bool:
        """Starts the limit's `ttl` anew, for work that takes longer; `False` if the slot is no longer held."""
        if self.slot is None:
            return False
        return wire.read_done(await self._limiter._ask("renew", {"slot": self.slot}), false_if="unknown_slot")

    def __bool__(self) -> bool:
        return self.decision.allowed
