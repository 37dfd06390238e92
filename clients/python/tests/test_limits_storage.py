"""`limits` on Tollkeeper's engine: its strategies, slowapi and Flask-Limiter."""

import time
from typing import Any

import limits
import pytest
from harness import Redis
from limits.storage import storage_from_string
from limits.strategies import STRATEGIES

import tollkeeper.limits
from tollkeeper import TollkeeperError


@pytest.fixture(params=["memory", "redis"])
def storage(request: Any, redis: Redis) -> Any:
    url = "memory://" if request.param == "memory" else redis.url
    options = {} if request.param == "memory" else {"redis": {"prefix": f"limits{time.monotonic_ns()}", "deadline": "1s"}}
    return tollkeeper.limits.TollkeeperStorage(f"tollkeeper+{url}", **options)


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategy_counts_and_clears(storage: Any, name: str) -> None:
    limiter = STRATEGIES[name](storage)
    item = limits.parse("5 per 2 days")
    assert limiter.test(item, "alice")
    assert limiter.get_window_stats(item, "alice").remaining == 5
    assert [limiter.hit(item, "alice") for _ in range(7)] == [True] * 5 + [False] * 2
    assert not limiter.test(item, "alice") and limiter.test(item, "bob")
    stats = limiter.get_window_stats(item, "alice")
    assert stats.remaining == 0 and time.time() < stats.reset_time <= time.time() + 2 * 86400
    assert not limiter.hit(item, "carol", cost=6)
    limiter.clear(item, "alice")
    assert limiter.hit(item, "alice", cost=5) and not limiter.hit(item, "alice")
    assert limiter.hit(limits.parse("9 per 2 days"), "alice"), "another limit counts for itself"


def test_schemes_are_registered(redis: Redis) -> None:
    assert storage_from_string("tollkeeper+memory://").check()
    with pytest.raises(TollkeeperError, match="invalid_config"):
        storage_from_string("tollkeeper+memory://", colour="red").check()


def test_reset_forgets_everything_in_memory() -> None:
    storage: Any = storage_from_string("tollkeeper+memory://")
    item = limits.parse("1/day")
    limiter = STRATEGIES["fixed-window"](storage)
    assert limiter.hit(item) and not limiter.hit(item)
    storage.reset()
    assert limiter.hit(item)


def test_slowapi_works_on_it() -> None:
    from fastapi import FastAPI, Request
    from fastapi.testclient import TestClient
    from slowapi import Limiter, _rate_limit_exceeded_handler
    from slowapi.errors import RateLimitExceeded
    from slowapi.util import get_remote_address

    limiter = Limiter(key_func=get_remote_address, storage_uri="tollkeeper+memory://", headers_enabled=True)
    app = FastAPI()
    app.state.limiter = limiter
    app.add_exception_handler(RateLimitExceeded, _rate_limit_exceeded_handler)  # type: ignore[arg-type]

    from fastapi import Response

    @app.get("/")
    @limiter.limit("5/day")
    async def home(request: Request, response: Response) -> str:
        return "hello"

    client = TestClient(app)
    answers = [client.get("/") for _ in range(6)]
    assert [answer.status_code for answer in answers] == [200] * 5 + [429]
    assert [answer.headers["x-ratelimit-remaining"] for answer in answers] == ["4", "3", "2", "1", "0", "0"]


def test_flask_limiter_works_on_it(redis: Redis) -> None:
    from flask import Flask
    from flask_limiter import Limiter
    from flask_limiter.util import get_remote_address

    app = Flask(__name__)
    limiter = Limiter(
        get_remote_address,
        app=app,
        storage_uri=f"tollkeeper+{redis.url}",
        storage_options={"redis": {"prefix": "flask", "deadline": "1s"}},  # type: ignore[dict-item]
        strategy="moving-window",
        headers_enabled=True,
    )

    @app.get("/")
    @limiter.limit("5/day")
    def home() -> str:
        return "hello"

    client = app.test_client()
    answers = [client.get("/") for _ in range(6)]
    assert [answer.status_code for answer in answers] == [200] * 5 + [429]
    assert answers[4].headers["X-RateLimit-Remaining"] == "0"
