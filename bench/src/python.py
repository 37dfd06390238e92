"""Measures the Python package next to `limits` and slowapi, interleaved, in one run.

    bench/python

Prints figures, ratios (theirs divided by ours: above 1, ours is faster) and goals, and saves every round to results.json.
"""

import asyncio
import gc
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median

import limits
import limits.aio.storage
import limits.aio.strategies
from fastapi import FastAPI, Request
from limits.storage import MemoryStorage, RedisStorage
from limits.strategies import STRATEGIES
from slowapi import Limiter as Slowapi
from slowapi.middleware import SlowAPIASGIMiddleware
from slowapi.util import get_remote_address

from tollkeeper import AsyncLimiter, Limiter
from tollkeeper.asgi import TollkeeperMiddleware

ROUNDS = 7
RESULTS = Path(__file__).parents[1] / "results.json"
measured = {}


def figure(name, value):
    print(f"figure {name} {value:.1f}", flush=True)


def goal(name, least, got):
    print(f"ratio {name} {got:.2f}")
    if least is not None:
        print(f"goal {name} want>={least} got {got:.2f} {'ok' if got >= least else 'MISSED'}", flush=True)


def interleaved(sides, measure):
    """Measures all sides in turn, so that all see the same noise."""
    rounds = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, side in sides.items():
            gc.collect()
            rounds[name].append(measure(side))
    return rounds


def in_memory():
    """Nanoseconds of CPU time for a call on one key."""

    def ours(rate, algorithm):
        limiter = Limiter(limits=[{"name": "per-user", "by": "user", "rate": rate, "algorithm": algorithm}])
        check, facts = limiter.check, {"user": "alice"}
        return lambda: check(facts)

    def ours_with_numbers(rate):
        check = ours(rate, "fixed-window")

        def numbers():
            decision = check()
            return decision.remaining, decision.reset_after

        return numbers

    def theirs(strategy, rate):
        hit, item = STRATEGIES[strategy](MemoryStorage()).hit, limits.parse(rate)
        return lambda: hit(item, "alice")

    def theirs_with_numbers(rate):
        limiter, item = STRATEGIES["fixed-window"](MemoryStorage()), limits.parse(rate)

        def numbers():
            limiter.hit(item, "alice")
            return limiter.get_window_stats(item, "alice")

        return numbers

    def nanoseconds(call, count=50_000):
        turns = range(count)
        began = time.thread_time_ns()
        for _ in turns:
            call()
        return (time.thread_time_ns() - began) / count

    for case, rate, other in (("allowed", "20000000/day", "20000000/day"), ("refused", "1/day", "1/day")):
        sides = {
            "tollkeeper-fixed-window": ours(rate, "fixed-window"),
            "tollkeeper-sliding-window": ours(rate, "sliding-window"),
            "tollkeeper-with-numbers": ours_with_numbers(rate),
            "limits-fixed-window": theirs("fixed-window", other),
            "limits-sliding-window-counter": theirs("sliding-window-counter", other),
            "limits-with-numbers": theirs_with_numbers(other),
        }
        if case == "refused":  # as a log of all hits takes memory for each
            sides["tollkeeper-sliding-log"] = ours("1/day", "sliding-log")
            sides["limits-moving-window"] = theirs("moving-window", other)
        rounds = interleaved(sides, nanoseconds)
        measured[f"memory-{case}-ns"] = rounds
        ns = {name: median(values) for name, values in rounds.items()}
        for name, value in ns.items():
            figure(f"python-memory-{case}/{name}-ns", value)
        pairs = [
            ("fixed-window", "fixed-window", 2.5),
            ("sliding-window", "sliding-window-counter", 2.5),
            ("with-numbers", "with-numbers", None),
        ]
        if case == "refused":
            pairs.append(("sliding-log", "moving-window", 2.5))
        for mine, other_name, least in pairs:
            ratio = ns[f"limits-{other_name}"] / ns[f"tollkeeper-{mine}"]
            goal(f"python-memory-{case}/limits-{other_name}", least, ratio)


def on_redis(socket):
    url = f"redis+unix://{socket}"
    limit = [{"name": "per-user", "by": "user", "rate": "20000000/day", "algorithm": "fixed-window"}]
    settings = {"redis": {"deadline": "1s"}}
    item = limits.parse("20000000/day")
    seconds = 1.0

    def from_a_thread(call):
        count, cpu, began = 0, time.process_time(), time.perf_counter()
        while time.perf_counter() - began < seconds:
            for _ in range(50):
                call()
            count += 50
        took = time.perf_counter() - began
        return count / took, (time.process_time() - cpu) / count * 1e6

    mine = Limiter(limits=limit, store=url, **settings)
    storage = RedisStorage(f"redis+unix://{socket}")
    hit = STRATEGIES["fixed-window"](storage).hit
    sides = {
        "tollkeeper": lambda: mine.check({"user": "alice"}),
        "limits": lambda: hit(item, "alice"),
    }
    report("python-redis-threads-1", interleaved(sides, from_a_thread), None)

    def in_a_loop(in_flight):
        def measure(make):
            async def run():
                call = await make()

                async def caller(end):
                    count = 0
                    while time.perf_counter() < end:
                        await call()
                        count += 1
                    return count

                await asyncio.gather(*(caller(time.perf_counter() + 0.1) for _ in range(in_flight)))
                cpu, began = time.process_time(), time.perf_counter()
                counts = await asyncio.gather(*(caller(began + seconds) for _ in range(in_flight)))
                took = time.perf_counter() - began
                return sum(counts) / took, (time.process_time() - cpu) / sum(counts) * 1e6

            return asyncio.run(run())

        return measure

    mine_async = AsyncLimiter(limits=limit, store=url, **settings)

    async def make_mine():
        return lambda: mine_async.check({"user": "alice"})

    async def make_theirs():
        # With redis-py, which is installed for the other rows; the default, coredis, would be one more dependency.
        storage = limits.aio.storage.RedisStorage(f"async+redis+unix://{socket}", implementation="redispy")
        hit = limits.aio.strategies.FixedWindowRateLimiter(storage).hit
        return lambda: hit(item, "alice")

    for in_flight, least in ((1, None), (64, 1.8)):
        rounds = interleaved({"tollkeeper": make_mine, "limits": make_theirs}, in_a_loop(in_flight))
        report(f"python-redis-asyncio-{in_flight}", rounds, least)


def report(name, rounds, least):
    case = name.removeprefix("python-")
    measured[case] = {
        side: {"rate": [rate for rate, _cpu in values], "cpu": [cpu for _rate, cpu in values]}
        for side, values in rounds.items()
    }
    rates = {side: median(rate for rate, _cpu in values) for side, values in rounds.items()}
    for side, values in rounds.items():
        figure(f"{name}/{side}-calls-a-second", rates[side])
        figure(f"{name}/{side}-cpu-us", median(cpu for _rate, cpu in values))
    goal(f"{name}/limits", least, rates["tollkeeper"] / rates["limits"])


def in_fastapi():
    """Microseconds of CPU time that a middleware adds to a request to FastAPI, without a socket."""

    def app(add):
        app = FastAPI()
        add(app)

        @app.get("/")
        async def hello(request: Request):
            return "hello"

        return app

    def add_ours(app):
        limit = {"name": "per-ip", "by": "ip", "rate": "20000000/day", "algorithm": "fixed-window"}
        app.add_middleware(TollkeeperMiddleware, limiter=AsyncLimiter(limits=[limit], headers=["x-ratelimit"]))

    def add_slowapi(app):
        limiter = Slowapi(key_func=get_remote_address, default_limits=["20000000/day"], headers_enabled=True)
        app.state.limiter = limiter
        app.add_middleware(SlowAPIASGIMiddleware)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
        "path": "/", "raw_path": b"/", "query_string": b"", "root_path": "", "client": ("192.0.2.7", 1),
        "server": ("127.0.0.1", 80), "headers": [(b"host", b"localhost"), (b"user-agent", b"bench"), (b"accept", b"*/*")],
    }  # fmt: skip

    def microseconds(app, count=1_500):
        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        statuses = set()

        async def send(message):
            statuses.add(message.get("status"))

        async def run():
            began = time.process_time_ns()
            for _ in range(count):
                await app(dict(scope), receive, send)
            return (time.process_time_ns() - began) / count / 1e3

        took = asyncio.run(run())
        assert statuses == {200, None}, statuses
        return took

    sides = {"bare": app(lambda app: None), "tollkeeper": app(add_ours), "slowapi": app(add_slowapi)}
    rounds = interleaved(sides, microseconds)
    measured["fastapi"] = rounds
    us = {name: median(values) for name, values in rounds.items()}
    for name in ("tollkeeper", "slowapi"):
        figure(f"python-fastapi/{name}-adds-us", us[name] - us["bare"])
    goal("python-fastapi/slowapi", None, (us["slowapi"] - us["bare"]) / (us["tollkeeper"] - us["bare"]))


def main():
    in_memory()
    folder = tempfile.mkdtemp(prefix="tk-")
    socket = f"{folder}/redis.sock"
    command = ["redis-server", "--port", "0", "--unixsocket", socket, "--save", "", "--appendonly", "no"]
    redis = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while not os.path.exists(socket):
            time.sleep(0.01)
        on_redis(socket)
    finally:
        redis.kill()
        redis.wait()
        shutil.rmtree(folder)
    in_fastapi()
    try:
        results = json.loads(RESULTS.read_text())
    except FileNotFoundError:
        results = {}
    # Saved like the parts of the other benchmarks: one that is measured on another machine names it.
    model = [line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    here = {"cpu": (model or ["unknown"])[0], "cores": len(os.sched_getaffinity(0)), "kernel": platform.release()}
    others = results.setdefault("other_machines", {})
    others.pop("python", None)
    if results.setdefault("machine", here) != here:
        others["python"] = here
    results["python"] = measured
    RESULTS.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")


main()
