"""Writes the requests of the HTTP API, and reads its answers. The engine speaks the same language in process."""

from __future__ import annotations

import json
from typing import Any, Dict, List, Mapping, NamedTuple, NoReturn, Optional, Union

from ._decision import Decision, LimitState, Numbers
from ._errors import TollkeeperError

#: What is known of a request: names to texts, whole numbers or booleans.
Facts = Mapping[str, Union[str, int, bool]]


class Answer(NamedTuple):
    """An answer as the HTTP API gives it."""

    status: int
    text: str
    headers: Dict[str, str]


class Text(NamedTuple):
    """The source of a decision that arrived as text."""

    text: str
    fields: Dict[str, Any]
    of_response: Dict[str, str]

    def json(self) -> str:
        return self.text

    def bound(self) -> Numbers:
        binding, retry_after = self.fields["binding"], self.fields["retry_after"]
        for limit in self.fields["limits"]:
            if limit["name"] == binding:
                return binding, limit["limit"], limit["remaining"], limit["reset_after"], retry_after
        return binding, None, None, None, retry_after

    def headers(self) -> Dict[str, str]:
        return self.of_response


def invalid_fact(name: object, problem: str) -> NoReturn:
    raise TollkeeperError("invalid_fact", f"fact `{str(name)[:64]}`: {problem}", f"facts.{str(name)[:64]}")


def checked_facts(facts: Facts) -> Dict[str, Union[str, int]]:
    """The facts as JSON can carry them. Everything else about them is judged by the engine or the server."""
    if not isinstance(facts, Mapping):
        raise TollkeeperError("invalid_fact", f"facts must be a mapping of names to values, not {kind(facts)}", "facts")
    checked: Dict[str, Union[str, int]] = {}
    for name, value in facts.items():
        if not isinstance(name, str):
            invalid_fact(name, f"a name must be a string, not {kind(name)}")
        if isinstance(value, str):
            if not encodable(value) or not encodable(name):
                invalid_fact(name.encode(errors="replace").decode(), "a lone surrogate is not text")
            checked[name] = str(value)
        elif isinstance(value, int):
            # `str` of an enum is its name, so the number is taken.
            checked[name] = value if isinstance(value, bool) else int(value)
        else:
            hint = "leave the fact out" if value is None else "a value is a string, a whole number or a boolean"
            invalid_fact(name, f"{kind(value)} is not a value ({hint})")
    return checked


def encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def kind(value: object) -> str:
    return "None" if value is None else f"`{type(value).__name__}`"


def checked_cost(cost: int) -> int:
    if isinstance(cost, bool) or not isinstance(cost, int):
        raise TollkeeperError("invalid_cost", f"the cost must be a whole number, not {kind(cost)}", "cost")
    return int(cost)


def request(facts: Facts, cost: int = 1) -> Dict[str, Any]:
    """The body of check, peek and acquire."""
    return {"facts": checked_facts(facts), "cost": checked_cost(cost)}


def reservation(facts: Facts, cost: int, ttl: float) -> Dict[str, Any]:
    if isinstance(ttl, bool) or not isinstance(ttl, (int, float)) or not 1 <= ttl <= 3600:
        raise TollkeeperError("invalid_ttl", "the ttl must be from 1 to 3600 seconds", "ttl")
    return {**request(facts, cost), "ttl": f"{round(ttl * 1000)}ms"}


def correction(charge: str, cost: Optional[int], facts: Optional[Facts]) -> Dict[str, Any]:
    """The body of settle and refund."""
    if not isinstance(charge, str):
        raise TollkeeperError(
            "invalid_json", f"`charge` must be the `charge` of an earlier decision, not {kind(charge)}", "charge"
        )
    body: Dict[str, Any] = {"charge": charge}
    if cost is not None:
        body["cost"] = checked_cost(cost)
    if facts is not None:
        body["facts"] = checked_facts(facts)
    return body


def write(body: Mapping[str, Any]) -> str:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


def read_decision(answer: Answer) -> Decision:
    """The decision in an answer. What cannot be read is an error, never a pass."""
    wire = read_object(answer, (200, 429))
    allowed = wire.get("allowed")
    if not isinstance(allowed, bool) or not {"binding", "retry_after", "delay", "degraded", "limits"} <= wire.keys():
        unreadable(answer)
    decision = Decision(allowed, Text(answer.text, wire, answer.headers))
    decision._wire = wire
    return decision


def read_done(answer: Answer, *, false_if: Optional[str] = None) -> bool:
    """Whether an operation did something. `false_if` is the error code that means it had nothing to do."""
    try:
        done = read_object(answer, (200,)).get("done")
    except TollkeeperError as error:
        if error.code == false_if:
            return False
        raise
    if not isinstance(done, bool):
        unreadable(answer)
    return done


def read_states(answer: Answer) -> List[LimitState]:
    limits = read_object(answer, (200,)).get("limits")
    if not isinstance(limits, list):
        unreadable(answer)
    return [LimitState._read(limit) for limit in limits]


def read_object(answer: Answer, expected: "tuple[int, ...]") -> Dict[str, Any]:
    """The JSON object in an answer with one of these statuses; the error in any other answer is raised."""
    try:
        wire = json.loads(answer.text)
    except ValueError:
        wire = None
    if not isinstance(wire, dict):
        unreadable(answer)
    error = wire.get("error")
    if isinstance(error, dict) and isinstance(error.get("code"), str):
        raise TollkeeperError(error["code"], str(error.get("message")), error.get("where"))
    if answer.status not in expected:
        unreadable(answer)
    return wire


def unreadable(answer: Answer) -> NoReturn:
    raise TollkeeperError(
        "unexpected_answer",
        f"the server answered {answer.status} with a body that is not an answer of Tollkeeper "
        f"({answer.text[:80]!r}): check the URL",
    )
