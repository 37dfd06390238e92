"""Processes that open a limiter and then fork, as gunicorn --preload, Celery and multiprocessing do."""

import asyncio
import multiprocessing
import os
import signal
from typing import Any

from harness import Redis, python, server

from tollkeeper import AsyncLimiter, Limiter

fork = multiprocessing.get_context("fork")
REDIS = {"prefix": "fork", "deadline": "1s"}


def limits(name: str) -> Any:
    return [{"name": name, "rate": "30/day", "algorithm": "sliding-log"}]


def counted(limiter: Limiter, results: Any) -> None:
    signal.alarm(60)  # a child that hangs ends as a failure
    results.put(sum(limiter.check({}).allowed for _ in range(20)))


def in_children(limiter: Limiter, children: int) -> int:
    results = fork.Queue()
    processes = [fork.Process(target=counted, args=(limiter, results)) for _ in range(children)]
    for process in processes:
        process.start()
    total = sum(results.get(timeout=90) for _ in processes)
    for process in processes:
        process.join(90)
        assert process.exitcode == 0
    return total


def test_children_share_the_count_in_redis(redis: Redis) -> None:
    limiter = Limiter(limits=limits("sync"), store=redis.url, redis=REDIS)
    assert sum(limiter.check({}).allowed for _ in range(10)) == 10
    assert in_children(limiter, 4) == 20
    assert not limiter.check({}), "the parent goes on"


def test_children_go_on_from_a_copy_in_memory() -> None:
    limiter = Limiter(limits=limits("memory"))
    assert sum(limiter.check({}).allowed for _ in range(25)) == 25
    assert in_children(limiter, 3) == 3 * 5
    assert limiter.check({}).remaining == 4, "the children count for themselves"


def test_child_uses_an_event_loop_of_its_own(redis: Redis) -> None:
    limiter = AsyncLimiter(limits=limits("loop"), store=redis.url, redis=REDIS)

    async def many() -> int:
        return sum(map(bool, await asyncio.gather(*(limiter.check({}) for _ in range(20)))))

    assert asyncio.run(many()) == 20

    def child(results: Any) -> None:
        signal.alarm(60)
        results.put(asyncio.run(many()))

    results = fork.Queue()
    process = fork.Process(target=child, args=(results,))
    process.start()
    assert results.get(timeout=90) == 10
    process.join(90)
    assert process.exitcode == 0


def test_child_opens_connections_of_its_own_to_a_server() -> None:
    """A connection that both processes use would bring one the answers of the other."""

    def own_answers(limiter: Limiter, user: str) -> bool:
        decisions = [limiter.check({"user": user}) for _ in range(200)]
        return all(decision.limits[0].key == [user] for decision in decisions)

    with server("limits: [{ name: per-user, by: user, rate: 1000/day }]") as url:
        limiter = Limiter(server=url, timeout=30)
        assert own_answers(limiter, "before")
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            os._exit(0 if own_answers(limiter, "child") else 1)
        assert own_answers(limiter, "parent")
        assert os.waitpid(child, 0)[1] == 0


def test_lock_that_is_held_during_a_fork_is_free_in_the_child() -> None:
    with server("limits: [{ name: all, rate: 1000/day }]") as url:
        limiter = Limiter(server=url, timeout=30, on_unavailable="deny")
        assert limiter.check({})
        with limiter._at.client._lock:  # type: ignore[union-attr]
            child = os.fork()
            if child == 0:
                signal.alarm(30)
                os._exit(0 if limiter.check({}) else 1)
            assert os.waitpid(child, 0)[1] == 0
        assert limiter.check({})


def test_fork_of_a_memory_store_warns_once() -> None:
    code = """
import logging, os, sys
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
from tollkeeper import Limiter
limiter = Limiter(limits=[{"name": "all", "rate": "30/day"}])
limiter.check({})
child = os.fork()
if child == 0:
    for _ in range(3):
        limiter.check({})
    sys.stdout.flush()
    os._exit(0)
os.waitpid(child, 0)
limiter.check({})
"""
    lines = [line for line in python(code).splitlines() if line.startswith("WARNING")]
    assert len(lines) == 1 and "fork" in lines[0], lines


def test_fork_while_threads_check() -> None:
    """A fork at any moment leaves a store that the child can use."""
    code = """
import os, signal, threading
from tollkeeper import Limiter
limiter = Limiter(limits=[{"name": "all", "by": "key", "rate": "30/day"}])
stop = False
def busy(number):
    count = 0
    while not stop:
        limiter.check({"key": f"{number}.{count % 1000}"})
        count += 1
threads = [threading.Thread(target=busy, args=(number,)) for number in range(4)]
for thread in threads: thread.start()
for _ in range(50):
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os._exit(0 if all(limiter.check({"key": str(key)}) for key in range(100)) else 1)
    assert os.waitpid(child, 0)[1] == 0
stop = True
for thread in threads: thread.join()
print("done")
"""
    assert python(code, timeout=120).strip() == "done"
