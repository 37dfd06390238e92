"""The engine in process, on the memory store."""

import asyncio
import enum
import json
import logging
import os
import random
import re
from pathlib import Path
from typing import Any, Dict, List, Mapping

import pytest
from harness import at_once, python, until

from tollkeeper import AsyncLimiter, Limiter, TollkeeperError
from tollkeeper._engine import Engine
from tollkeeper.testing import testing, testing_async

PER_USER = [{"name": "per-user", "by": "user", "rate": "100/min", "burst": 5}]


def test_decision_has_the_fields_of_the_api() -> None:
    limiter, clock = testing(limits=PER_USER, at=1_760_000_000)
    decision = limiter.check({"user": "alice"}, cost=2)
    assert decision and decision.allowed
    assert (decision.binding, decision.limit, decision.remaining, decision.reset_after) == ("per-user", 5, 3, 1.2)
    assert (decision.retry_after, decision.delay, decision.never, decision.reason) == (None, 0, False, None)
    assert decision.degraded is None and decision.charge
    [state] = decision.limits
    assert (state.name, state.key, state.algorithm, state.cost) == ("per-user", ["alice"], "token-bucket", 2)
    headers = {
        "ratelimit-policy": '"per-user";q=5;w=3',
        "ratelimit": '"per-user";r=3;t=1',
        "x-ratelimit-limit": "5",
        "x-ratelimit-remaining": "3",
        "x-ratelimit-reset": "1760000002",
    }
    assert limiter.headers(decision) == headers
    refused = limiter.check({"user": "alice"}, cost=4)
    assert not refused and refused.retry_after == 0.6 and refused.charge is None
    assert refused.reason and "fits in 0.6 s" in refused.reason
    assert "allowed=False" in repr(refused)
    clock.advance(0.6)
    assert limiter.check({"user": "alice"}, cost=4)
    assert limiter.check({"user": "bob"}, cost=6).never
    nothing = limiter.check({})
    assert nothing and nothing.binding is None and nothing.limit is None and nothing.limits == []


def test_every_call_works() -> None:
    limits = [
        {"name": "per-user", "by": "user", "rate": "5/day", "algorithm": "sliding-log"},
        {"name": "tokens", "by": "key", "rate": "1000/day", "algorithm": "fixed-window", "cost": "tokens"},
        {"name": "exports", "by": "tenant", "algorithm": "concurrency", "limit": 1, "ttl": "60s"},
    ]
    limiter, clock = testing(limits=limits)
    first = limiter.check({"user": "u"}, 2)
    assert limiter.peek({"user": "u"}, 3) and not limiter.peek({"user": "u"}, 4)
    assert limiter.usage({"user": "u"})[0].remaining == 3
    assert first.charge and limiter.refund(first.charge, 1) and not limiter.refund(first.charge, 1)
    assert limiter.usage({"user": "u"})[0].remaining == 4
    reserved = limiter.reserve({"key": "k", "tokens": 400}, ttl=30)
    assert reserved.charge and limiter.settle(reserved.charge, facts={"tokens": 100})
    assert limiter.usage({"key": "k"})[0].remaining == 900
    assert limiter.forget("tokens", {"key": "k"}) and not limiter.forget("tokens", {"key": "k"})
    assert [limit["applies"] for limit in limiter.explain({"user": "u"})] == [True, False, False]
    assert [limit["name"] for limit in limiter.policy()["limits"]] == ["per-user", "tokens", "exports"]
    with limiter.acquire({"tenant": "t"}) as held:
        assert held and held.slot and held.renew()
        with limiter.acquire({"tenant": "t"}) as second:
            assert not second and second.slot is None and not second.release()
    assert not held.release() and not held.renew()
    with limiter.acquire({"tenant": "t"}):
        clock.advance(61)
        assert limiter.acquire({"tenant": "t"}), "the slot has expired"


def test_asyncio_has_the_same_calls() -> None:
    async def calls() -> None:
        limiter, clock = testing_async(limits=PER_USER)
        decisions = await asyncio.gather(*(limiter.check({"user": "alice"}) for _ in range(20)))
        assert sum(map(bool, decisions)) == 5
        assert not await limiter.peek({"user": "alice"})
        clock.advance(0.6)
        assert await limiter.until_allowed({"user": "alice"}, timeout=0)
        assert not await limiter.until_allowed({"user": "alice"}, timeout=0)
        await limiter.close()
        await limiter.close()
        with pytest.raises(TollkeeperError, match="closed"):
            await limiter.check({"user": "alice"})

    asyncio.run(calls())


def test_until_allowed_waits_for_its_turn() -> None:
    limiter = Limiter(limits=[{"name": "fast", "rate": "50/s", "burst": 1}])
    decisions = at_once([lambda: limiter.until_allowed({}, timeout=30)] * 10)
    assert all(decisions)
    assert not limiter.until_allowed({}, 2, timeout=1), "waiting cannot help"


class Color(str, enum.Enum):
    RED = "red"


class Number(enum.IntEnum):
    TWO = 2


class Name(str):
    pass


def test_fast_path_matches_general_path() -> None:
    """The path without JSON decides and answers as the general one, which any other mapping takes."""

    class Other(Mapping[str, Any]):
        def __init__(self, facts: Dict[str, Any]) -> None:
            self._facts = facts

        def __getitem__(self, name: str) -> Any:
            return self._facts[name]

        def __iter__(self) -> Any:
            return iter(self._facts)

        def __len__(self) -> int:
            return len(self._facts)

    limits = [
        {"name": "per-user", "by": "user", "rate": "3/min", "burst": 3},
        {"name": "per-ip", "by": "ip", "rate": "5/min"},
        {"name": "tokens", "by": "user", "rate": "50/min", "cost": "tokens", "cost_missing": "skip"},
        {"name": "secret", "by": "secret", "rate": "4/min", "algorithm": "fixed-window"},
    ]
    http = {"facts": {"secret": {"from": "header.x-secret", "hash": True}}}
    fast, fast_clock = testing(limits=limits, at=1_000, http=http)
    general, general_clock = testing(limits=limits, at=1_000, http=http)
    values: List[Any] = ["alice", "bob", "", "é", "日本", 7, -7, 2**63, True, False, Color.RED, Number.TWO, Name("x")]
    values += ["192.0.2.7", "::ffff:192.0.2.7", "nowhere", "x" * 1024, "x" * 1025, None, 1.5, [], "\ud800", b"b"]
    names = ["user", "ip", "tokens", "secret", "a b", "", "é", 7]
    picked = random.Random(7)
    seen = set()
    for step in range(3_000):
        facts = {picked.choice(names): picked.choice(values) for _ in range(picked.randrange(4))}
        cost = picked.choice([1, 1, 1, 2, 5, 0, -1, True, 1.0, None, 2**31, 2**31 + 1, 2**64])

        def outcome(limiter: Limiter, facts: Any, cost: Any = cost) -> Any:
            try:
                decision = limiter.check(facts, cost)
                seen.add(decision.allowed)
                shown = decision.to_dict()
                shown["charge"] = shown["charge"] is not None  # its number is drawn at random
                numbers = (decision.binding, decision.limit, decision.remaining, decision.reset_after, decision.retry_after)
                return shown, limiter.headers(decision), numbers
            except TollkeeperError as error:
                seen.add(error.code)
                return error.code, error.where

        assert outcome(fast, facts) == outcome(general, Other(facts)), f"step {step}: {facts}, cost {cost}"
        if step % 5 == 0:
            fast_clock.advance(1.5)
            general_clock.advance(1.5)
    assert seen == {True, False, "invalid_fact", "invalid_cost"}


@pytest.mark.parametrize(
    ("facts", "cost", "code", "where"),
    [
        ([], 1, "invalid_fact", "facts"),
        (None, 1, "invalid_fact", "facts"),
        ("user", 1, "invalid_fact", "facts"),
        ({"user": None}, 1, "invalid_fact", "facts.user"),
        ({"user": 1.0}, 1, "invalid_fact", "facts.user"),
        ({"user": float("nan")}, 1, "invalid_fact", "facts.user"),
        ({"user": ["alice"]}, 1, "invalid_fact", "facts.user"),
        ({"user": {"sha256": "0" * 32}}, 1, "invalid_fact", "facts.user"),
        ({"user": b"alice"}, 1, "invalid_fact", "facts.user"),
        ({"user": "\udc80"}, 1, "invalid_fact", "facts.user"),
        ({7: "alice"}, 1, "invalid_fact", "facts.7"),
        ({"us er": "alice"}, 1, "invalid_fact", "facts.us er"),
        ({"user": "x" * 2_000_000}, 1, "invalid_fact", "facts.user"),
        ({f"f{n}": 1 for n in range(65)}, 1, "too_many", "facts"),
        ({}, 0, "invalid_cost", "cost"),
        ({}, -1, "invalid_cost", "cost"),
        ({}, 1.5, "invalid_cost", "cost"),
        ({}, float("nan"), "invalid_cost", "cost"),
        ({}, 2**53, "invalid_cost", "cost"),
        ({}, 10**30, "invalid_cost", "cost"),
        ({}, "1", "invalid_cost", "cost"),
        ({}, True, "invalid_cost", "cost"),
        ({}, None, "invalid_cost", "cost"),
    ],
)
def test_bad_input_is_named_and_charges_nothing(facts: Any, cost: Any, code: str, where: str) -> None:
    limiter, _clock = testing(limits=[{"name": "all", "rate": "5/day"}])
    for call in (limiter.check, limiter.peek, limiter.reserve, limiter.acquire):
        with pytest.raises(TollkeeperError) as raised:
            call(facts, cost)  # type: ignore[operator]
        assert (raised.value.code, raised.value.where) == (code, where), str(raised.value)
        assert len(str(raised.value)) < 500
    assert limiter.usage({})[0].remaining == 5


def test_corrections_take_only_charges() -> None:
    limiter, _clock = testing(limits=PER_USER)
    for charge in ("", "nonsense", "\0", None, 7):
        for call in (limiter.settle, limiter.refund):
            with pytest.raises(TollkeeperError, match="unknown_charge|invalid_json"):
                call(charge, 1)  # type: ignore[arg-type]
    for ttl in (0, 3601, float("nan"), "60s", None):
        with pytest.raises(TollkeeperError, match="invalid_ttl"):
            limiter.reserve({"user": "x"}, ttl=ttl)  # type: ignore[arg-type]
    with pytest.raises(TollkeeperError, match="unknown_limit"):
        limiter.forget("nothing", {"user": "x"})


def test_invalid_config_is_named() -> None:
    for limits, message in [
        ([{"name": "x"}], "rate"),
        ([{"name": "x", "rate": "5/mn"}], "5/mn"),
        ([{"name": "x", "rate": "5/min", "brust": 7}], "brust"),
        ([{"name": "x", "rate": {1, 2}}], "plain values"),
    ]:
        with pytest.raises(TollkeeperError, match=message) as raised:
            Limiter(limits=limits)
        assert raised.value.code == "invalid_config"
    with pytest.raises(TollkeeperError, match="invalid_config"):
        Limiter("/nowhere/tollkeeper.yaml")
    with pytest.raises(TollkeeperError, match="invalid_config"):
        Limiter(limits=[], store="mysql://x")
    with pytest.raises(TollkeeperError, match="colour"):
        Limiter(limits=[], colour="red")


def test_threads_admit_exactly_the_limit() -> None:
    limiter = Limiter(limits=[{"name": "all", "rate": "1000/day", "algorithm": "sliding-log"}])

    def many() -> int:
        return sum(limiter.check({}).allowed for _ in range(500))

    assert sum(at_once([many] * 8)) == 1000


def test_limiters_with_one_name_share_their_counts() -> None:
    limits = [{"name": "all", "rate": "3/day"}]
    one = Limiter(limits=limits, name="shared")
    other = AsyncLimiter(limits=limits, name="shared")
    assert one.check({}) and asyncio.run(other.check({})) and one.check({}) and not one.check({})
    one.close()
    assert not asyncio.run(other.check({})), "it stays open for the other one"


def test_file_is_followed_and_a_broken_one_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tollkeeper.yaml"

    def rewrite(text: str) -> None:
        (tmp_path / "new").write_text(text)
        os.replace(tmp_path / "new", path)

    rewrite("limits: [{ name: all, rate: 3/day, algorithm: sliding-log }]")
    with caplog.at_level(logging.INFO, "tollkeeper"), Limiter(path) as limiter:
        assert limiter.check({}).remaining == 2
        rewrite("limits: [{ name: all, rate: 9/day, algorithm: sliding-log }]")
        until(lambda: limiter.peek({}).limit == 9, "the new limit is active")
        assert limiter.check({}).remaining == 7, "the count is kept"
        until(lambda: any("is active" in record.message for record in caplog.records), "the reload is logged")
        rewrite("limits: [{ name: all, rate: 9 apples }]")
        until(lambda: any(record.levelno == logging.ERROR for record in caplog.records), "the mistake is logged")
        assert limiter.check({}).remaining == 6


def test_script_that_opens_limiters_ends(tmp_path: Path) -> None:
    path = tmp_path / "tollkeeper.yaml"
    path.write_text("limits: [{ name: slots, algorithm: concurrency, limit: 3 }]")
    code = (
        "import sys; from tollkeeper import Limiter; limiter = Limiter(sys.argv[1]); "
        "held = limiter.acquire({}); print(held.decision.allowed)"
    )
    assert python(code, str(path)) == "True\n"


def test_closed_limiters_leave_no_threads(tmp_path: Path) -> None:
    path = tmp_path / "tollkeeper.yaml"
    path.write_text("limits: [{ name: all, rate: 3/day }]")

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    Limiter(path).close()
    before = threads()
    for _ in range(10_000):
        Limiter(limits=PER_USER).close()
    for _ in range(20):
        Limiter(path).close()
        Limiter(path)  # closed when it is collected
    until(lambda: threads() <= before, f"{threads()} threads, and {before} before")


def test_calls_after_close_raise() -> None:
    limiter, _clock = testing(limits=PER_USER)
    decision = limiter.check({"user": "a"})
    limiter.close()
    limiter.close()
    for call in (limiter.check, limiter.peek, limiter.usage, limiter.explain):
        with pytest.raises(TollkeeperError, match="closed"):
            call({"user": "a"})
    assert decision.remaining == 4, "a decision outlives its limiter"


def test_dialects_of_headers() -> None:
    for dialect, names in [
        ("ietf", {"ratelimit-policy", "ratelimit"}),
        ("draft-03", {"ratelimit-limit", "ratelimit-remaining", "ratelimit-reset"}),
        ("draft-06", {"ratelimit-policy", "ratelimit-limit", "ratelimit-remaining", "ratelimit-reset"}),
        ("draft-07", {"ratelimit-policy", "ratelimit"}),
        ("x-ratelimit", {"x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"}),
    ]:
        limiter, _clock = testing(limits=PER_USER, headers=[dialect])
        assert limiter.headers(limiter.check({"user": "a"})).keys() == names
        assert limiter.headers(limiter.check({"user": "a"}, 5)).keys() == names | {"retry-after"}


FOLDER = Path(__file__).parents[2] / "conformance"
# `bypasses.json` has requests, not calls.
CONFORMANCE = sorted(path for path in FOLDER.glob("*.json") if path.name != "bypasses.json")


def test_there_are_conformance_files() -> None:
    assert len(CONFORMANCE) > 8


@pytest.mark.parametrize("path", CONFORMANCE, ids=lambda path: path.stem)
def test_answers_are_equal_in_every_language(path: Path) -> None:
    """Every step answers the same bytes as the engine in Rust, the addon of Node and a server."""
    file = json.loads(path.read_text())
    limiter, clock = testing(at=file["at"], **file["config"])
    engine = limiter._at
    assert isinstance(engine, Engine)
    saved: Dict[str, str] = {}
    for number, step in enumerate(file["steps"]):
        if "advance" in step:
            clock.advance(step["advance"])
            continue
        body = re.sub(r'"\$(\w+)"', lambda found: json.dumps(saved[found[1]]), step["in"])
        status, out, _headers = engine._native.ask(engine.number, step["call"], body)
        for field in ("charge", "slot"):
            found = re.search(rf'"{field}":"([^"]+)"', out)
            if found:
                name = step.get("save", {}).get(field, field)
                saved[name] = found[1]
                out = out.replace(f'"{field}":"{found[1]}"', f'"{field}":"${name}"')
        assert (status, out) == (step["status"], step["out"]), f"step {number}: {step['in']}"


