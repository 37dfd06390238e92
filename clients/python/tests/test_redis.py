"""The engine on a real Redis: shared counts, failures, and an event loop that is never blocked."""

import asyncio
import signal
from typing import Any

import pytest
from harness import Redis, at_once, python, server, until

from tollkeeper import AsyncLimiter, Limiter, TollkeeperError

LOG = "sliding-log"


def limiter(redis: Redis, prefix: str, kind: Any = Limiter, deadline: str = "1s", **limit: Any) -> Any:
    limits = [{"name": "all", "by": "key", "rate": "100/day", "algorithm": LOG, **limit}]
    return kind(limits=limits, store=redis.url, redis={"prefix": prefix, "deadline": deadline})


def test_processes_and_a_server_share_one_limit(redis: Redis) -> None:
    """Two Python processes, threads, an event loop and a server together admit exactly the limit."""
    code = (
        "import sys; from tollkeeper import Limiter\n"
        "limits = [{'name': 'all', 'by': 'key', 'rate': '100/day', 'algorithm': 'sliding-log'}]\n"
        "limiter = Limiter(limits=limits, store=sys.argv[1], redis={'prefix': 'shared', 'deadline': '1s'})\n"
        "print(sum(limiter.check({'key': 'k'}).allowed for _ in range(60)))\n"
    )
    policy = f"""
store: {redis.url}
redis: {{ prefix: shared, deadline: 1s }}
limits: [{{ name: all, by: key, rate: 100/day, algorithm: {LOG} }}]
"""

    async def in_a_loop() -> int:
        many = limiter(redis, "shared", AsyncLimiter)
        decisions = await asyncio.gather(*(many.check({"key": "k"}) for _ in range(60)))
        await many.close()
        return sum(map(bool, decisions))

    with server(policy) as url:
        client = Limiter(server=url, timeout=10)
        counts = at_once(
            [lambda: int(python(code, redis.url))] * 2
            + [lambda: sum(client.check({"key": "k"}).allowed for _ in range(60))]
            + [lambda: asyncio.run(in_a_loop())]
        )
    assert sum(counts) == 100, counts


def test_threads_wait_for_redis_without_the_gil(redis: Redis) -> None:
    """A thread that waits for a stopped Redis lets the others run."""
    slow = limiter(redis, "gil", deadline="5s", on_store_failure="allow")
    assert slow.check({"key": "k"})
    redis.signal(signal.SIGSTOP)
    try:
        # The second thread can resume Redis only if the first one waits without the GIL.
        decision, _ = at_once([lambda: slow.check({"key": "k"}), lambda: redis.signal(signal.SIGCONT)])
        assert decision.allowed and decision.degraded is None
    finally:
        redis.signal(signal.SIGCONT)


def test_stopped_redis_is_answered_by_the_failure_policy(redis: Redis) -> None:
    own = Redis()
    try:
        for policy, allowed in [("allow", True), ("deny", False), ("local", True)]:
            waits = limiter(own, policy, on_store_failure=policy, deadline="50ms")
            assert waits.check({"key": "k"}).degraded is None
            own.signal(signal.SIGSTOP)
            decisions = [waits.check({"key": "k"}) for _ in range(20)]
            assert {decision.degraded for decision in decisions} == {policy}
            assert all(decision.allowed == allowed for decision in decisions)
            own.signal(signal.SIGCONT)
            until(lambda: waits.check({"key": "k"}).degraded is None, "Redis is asked again")
            waits.close()
    finally:
        own.close()


def test_event_loop_runs_while_redis_is_stopped() -> None:
    """The loop keeps turning while every check waits for its deadline."""
    own = Redis()

    async def turns_during_checks() -> int:
        waits = limiter(own, "loop", AsyncLimiter, deadline="200ms", on_store_failure="allow")
        assert (await waits.check({"key": "k"})).degraded is None
        own.signal(signal.SIGSTOP)
        turns = 0

        async def turning() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        task = asyncio.create_task(turning())
        decisions = await asyncio.gather(*(waits.check({"key": "k"}) for _ in range(50)))
        task.cancel()
        assert {decision.degraded for decision in decisions} == {"allow"}
        own.signal(signal.SIGCONT)
        await waits.close()
        return turns

    try:
        turns = asyncio.run(turns_during_checks())
    finally:
        own.signal(signal.SIGCONT)
        own.close()
    # If checks blocked the loop, it would turn about once for each.
    assert turns > 200, turns


def test_restarted_redis_is_used_again() -> None:
    own = Redis()
    try:
        survives = limiter(own, "restart", on_store_failure="deny", deadline="100ms")
        assert survives.check({"key": "k"})
        own.kill()
        decision = survives.check({"key": "k"})
        assert (decision.allowed, decision.degraded) == (False, "deny")
        own.start()
        until(lambda: survives.check({"key": "k"}).allowed, "Redis is asked again")
    finally:
        own.close()


def test_every_call_works_in_asyncio_on_redis(redis: Redis) -> None:
    async def calls(user: str) -> None:
        limits = [
            {"name": "per-user", "by": "user", "rate": "5/day", "algorithm": LOG},
            {"name": "exports", "by": "tenant", "algorithm": "concurrency", "limit": 1, "ttl": "60s"},
        ]
        async with AsyncLimiter(limits=limits, store=redis.url, redis={"prefix": "calls", "deadline": "1s"}) as many:
            first = await many.check({"user": user}, 2)
            assert first and many.headers(first)["x-ratelimit-remaining"] == "3"
            assert first.charge and await many.refund(first.charge) and not await many.refund(first.charge)
            reserved = await many.reserve({"user": user}, 4)
            assert reserved.charge and await many.settle(reserved.charge, 1)
            assert (await many.usage({"user": user}))[0].remaining == 4
            assert await many.forget("per-user", {"user": user})
            async with many.acquire({"tenant": "t"}) as held:
                assert held and await held.renew() and not await many.acquire({"tenant": "t"})
            assert not await held.release()
            waiting = asyncio.create_task(many.check({"user": "cancelled"}))
            await asyncio.sleep(0)
            waiting.cancel()
            assert await many.check({"user": user}), "a cancelled call does not disturb others"
        with pytest.raises(TollkeeperError, match="closed"):
            await many.check({"user": user})

    # Each loop has its own mailbox.
    asyncio.run(calls("a"))
    asyncio.run(calls("b"))
