"""What a limiter answers: a decision, and the state of each limit that applied."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Protocol, Tuple


@dataclass(frozen=True, slots=True)
class LimitState:
    """One limit that applied to a request. Times are seconds, not rounded."""

    #: ``per-user``
    name: str
    #: The values that it counts by: ``["alice"]``. An absent fact is ``None``.
    key: List[Optional[str]]
    #: ``token-bucket``
    algorithm: str
    #: ``enforce``, or ``shadow`` if it counts and refuses nothing.
    mode: str
    #: Whether this limit allows the request.
    allowed: bool
    #: Units that the request costs under this limit: 2.
    cost: int
    #: Units that an unused key can take at once: the burst of a bucket, the quota of a window.
    limit: int
    #: Units left after this decision: 18 of 20 after a cost of 2. ``None`` if they were not counted.
    remaining: Optional[int]
    #: Seconds until a retry can pass: 0.6. ``None`` if allowed, or if waiting does not help.
    retry_after: Optional[float]
    #: Seconds until the full limit is available: 12.0.
    reset_after: Optional[float]
    #: The failure policy that decided because the store did not answer: ``allow``, ``deny`` or ``local``.
    degraded: Optional[str]
    #: Whether waiting does not help: the cost is above the limit.
    never: bool
    #: Whether this process answered from what it knows of the key, without asking Redis.
    approximate: bool
    #: Whether a full memory store made the key share a count.
    overflow: bool
    #: ``{"until": 4102444800}`` if the key has a quota of its own at run time.
    override: Optional[Dict[str, Any]]

    @staticmethod
    def _read(wire: Dict[str, Any]) -> LimitState:
        return LimitState(
            name=wire["name"],
            key=wire["key"],
            algorithm=wire["algorithm"],
            mode=wire["mode"],
            allowed=wire["allowed"],
            cost=wire["cost"],
            limit=wire["limit"],
            remaining=wire["remaining"],
            retry_after=wire["retry_after"],
            reset_after=wire["reset_after"],
            degraded=wire["degraded"],
            never=wire.get("never", False),
            approximate=wire.get("approximate", False),
            overflow=wire.get("overflow", False),
            override=wire.get("override"),
        )


#: Name, limit, remaining and reset of the limit that decided, and when to retry.
Numbers = Tuple[Optional[str], Optional[int], Optional[int], Optional[float], Optional[float]]


class Source(Protocol):
    """Where the fields of a decision come from: an answer of a server, or a decision of the engine."""

    def json(self) -> str:
        """The decision as the HTTP API writes it."""

    def bound(self) -> Numbers:
        """What most callers read of a decision."""

    def headers(self) -> Dict[str, str]:
        """The headers for the response to the client."""


class Decision:
    """Whether a request may pass, and when to retry if not. ``bool(decision)`` is ``decision.allowed``.

    Only ``allowed`` is read when a decision is made. The other fields are read from the engine when they are used, so
    a check that looks at nothing else takes less than a microsecond.
    """

    __slots__ = ("_source", "_wire", "allowed")

    #: Whether the request may pass.
    allowed: bool
    _source: Source
    _wire: Dict[str, Any]

    def __init__(self, allowed: bool, source: Source) -> None:
        self.allowed = allowed
        self._source = source

    def to_dict(self) -> Dict[str, Any]:
        """The decision as in the HTTP API."""
        try:
            return self._wire
        except AttributeError:
            self._wire = json.loads(self._source.json())
            return self._wire

    @property
    def binding(self) -> Optional[str]:
        """The name of the limit that decided; ``None`` if no limit applied."""
        return self._source.bound()[0]

    @property
    def limit(self) -> Optional[int]:
        """What an unused key can take at once under the binding limit: 20."""
        return self._source.bound()[1]

    @property
    def remaining(self) -> Optional[int]:
        """Units left under the binding limit after this decision: 18 of 20 after a cost of 2."""
        return self._source.bound()[2]

    @property
    def reset_after(self) -> Optional[float]:
        """Seconds until the full binding limit is available: 12.0."""
        return self._source.bound()[3]

    @property
    def retry_after(self) -> Optional[float]:
        """Seconds until a retry can pass: 0.6. ``None`` if allowed, or if waiting does not help."""
        return self._source.bound()[4]

    @property
    def delay(self) -> float:
        """Seconds that an admitted request should wait before it continues; only a leaky bucket sets it."""
        seconds: float = self.to_dict()["delay"]
        return seconds

    @property
    def never(self) -> bool:
        """Whether waiting does not help: the cost is above the limit, for example."""
        never: bool = self.to_dict().get("never", False)
        return never

    @property
    def reason(self) -> Optional[str]:
        """A sentence for people, on refusals only."""
        reason: Optional[str] = self.to_dict().get("reason")
        return reason

    @property
    def degraded(self) -> Optional[str]:
        """The failure policy that decided because store or server did not answer: ``allow``, ``deny``, ``local``."""
        policy: Optional[str] = self.to_dict()["degraded"]
        return policy

    @property
    def charge(self) -> Optional[str]:
        """The receipt for ``refund`` and ``settle``; ``None`` if nothing was charged in the store."""
        charge: Optional[str] = self.to_dict()["charge"]
        return charge

    @property
    def limits(self) -> List[LimitState]:
        """Every limit that applied, in the order of the config, including those in shadow mode."""
        return [LimitState._read(limit) for limit in self.to_dict()["limits"]]

    def __bool__(self) -> bool:
        return self.allowed

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, Decision) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        fields = ("allowed", "binding", "limit", "remaining", "retry_after", "reset_after", "degraded")
        shown = (f"{name}={getattr(self, name)!r}" for name in fields)
        return f"Decision({', '.join(shown)})"
