"""Real applications under real web servers."""

import asyncio
import json
from typing import Any, Iterator, List

import pytest
from harness import Redis, Web, at_once, config, gunicorn, until, uvicorn, web

from tollkeeper import TollkeeperError

SERVERS = {
    "fastapi-uvicorn": (uvicorn("fastapi_app:app"), "memory", {}),
    "fastapi-redis": (uvicorn("fastapi_app:app"), "redis", {}),
    "flask-preload": (gunicorn("flask_app:app", 1, "--preload", "--threads", "8"), "memory", {}),
    "django-gunicorn": (gunicorn("django_app:application", 2, "--preload"), "redis", {}),
    "django-uvicorn": (uvicorn("django_app:asgi"), "memory", {"INTERFACE": "asgi"}),
    "flask-gunicorn": (gunicorn("flask_app:app", 2), "redis", {}),
    "wsgi-gunicorn": (gunicorn("flask_app:app", 2), "redis", {"INTERFACE": "wsgi"}),
}


@pytest.fixture(scope="module", params=SERVERS)
def app(request: Any, redis: Redis, tmp_path_factory: Any) -> Iterator[Web]:
    command, store, environment = SERVERS[request.param]
    policy = config(tmp_path_factory.mktemp("app"), redis.url if store == "redis" else "memory://", request.param)
    with web(command, policy, **environment) as app:
        app.name = request.param
        yield app


def test_sixth_request_is_refused_with_headers(app: Web) -> None:
    answers = [app.get("/") for _ in range(6)]
    assert [answer.status for answer in answers] == [200] * 5 + [429]
    assert [answer.headers["x-ratelimit-remaining"] for answer in answers] == ["4", "3", "2", "1", "0", "0"]
    refused = answers[5]
    assert refused.headers["ratelimit-policy"] == '"home";q=5;w=86400'
    assert refused.headers["ratelimit"].startswith('"home";r=0;t=')
    assert refused.headers["x-ratelimit-limit"] == "5"
    assert refused.headers["cache-control"] == "no-store"
    assert refused.headers["content-type"] == "application/problem+json"
    assert 0 < int(refused.headers["retry-after"]) <= 86400
    problem = refused.json()
    assert problem["status"] == 429 and problem["violated-policies"] == ["home"]
    assert "retry-after" not in answers[0].headers
    # A spelling of the path has no count of its own.
    assert {app.get(path).status for path in ("//", "/./", "/?a", "/;a")} <= {429, 404}


def test_of_100_connections_exactly_20_reach_the_handler(app: Web) -> None:
    answers = at_once([lambda: app.get("/burst").status] * 100)
    assert (answers.count(200), answers.count(429)) == (20, 80)


def test_only_failed_logins_are_charged(app: Web) -> None:
    wrong = {"email": "Mallory@Example.com", "password": "guess"}
    right = {"email": "mallory@example.com ", "password": "right"}
    assert [app.post("/login", right).status for _ in range(8)] == [200] * 8
    answers = at_once([lambda: app.post("/login", wrong)] * 30)
    statuses = [answer.status for answer in answers]
    assert (statuses.count(401), statuses.count(429)) == (5, 25)
    assert next(answer for answer in answers if answer.status == 401).json() == wrong, "the handler reads the body"
    assert app.post("/login", right).status == 429
    assert app.post("/login", {"email": "other@example.com", "password": "x"}).status == 401


def test_unreadable_bodies_are_refused(app: Web) -> None:
    def post(body: bytes) -> int:
        return app.request("POST", "/login", body, {"content-type": "application/json"}).status

    assert post(b'{"email":"a@b.c","email":"d@e.f","password":"x"}') == 400
    assert post(json.dumps({"email": "a@b.c", "password": "x" * 70_000}).encode()) == 413
    chunked = b"POST /login HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    body = b'{"email":"chunked@b.c","password":"x"}'
    with app.raw(chunked + b"Connection: close\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)) as connection:
        # Django under WSGI reads no chunked bodies: limiter and view see an empty one.
        expected = b"500" if app.name == "django-gunicorn" else b"401"
        assert connection.recv(4096).split(b" ")[1] == expected


def test_slot_is_held_while_a_body_streams(app: Web) -> None:
    stream = app.stream()
    assert [app.get("/stream").status for _ in range(3)] == [429] * 3
    stream.close()

    def again() -> Any:
        connection = app.raw(b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        status = connection.recv(4096)[:12]
        if status == b"HTTP/1.1 200":
            return connection
        connection.close()
        return None

    until(again, "the slot of a client that is gone is released").close()


class TestFastapi:
    @pytest.fixture(scope="class")
    def app(self, tmp_path_factory: Any) -> Iterator[Web]:
        policy = config(tmp_path_factory.mktemp("fastapi"))
        with web(uvicorn("fastapi_app:app"), policy) as app:
            yield app

    def test_dependency_limits_one_route(self, app: Web) -> None:
        answers = [app.get("/search", **{"x-user": "alice"}) for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 429]
        assert answers[0].headers["ratelimit"].startswith('"search";r=1;t=')
        assert "retry-after" in answers[2].headers and "search" in answers[2].json()["detail"]
        assert app.get("/search", **{"x-user": "bob"}).status == 200

    def test_websocket_handshake_is_decided(self, app: Web) -> None:
        import websockets
        from websockets.sync.client import connect

        url = "ws://{}:{}/socket".format(*app.address)
        with connect(url) as first:
            assert first.recv() == "hello"
            with pytest.raises(websockets.InvalidStatus) as refused, connect(url):
                pass
            response = refused.value.response
            assert response.status_code == 429
            assert response.headers["content-type"] == "application/problem+json"

        def again() -> bool:
            try:
                with connect(url) as second:
                    return bool(second.recv() == "hello")
            except websockets.InvalidStatus:
                return False

        until(again, "the slot is released when the socket closes")


def test_asgi_without_the_extension_closes_the_socket() -> None:
    from tollkeeper.asgi import TollkeeperMiddleware
    from tollkeeper.testing import testing_async

    limiter, _clock = testing_async(limits=[{"name": "none", "rate": "0/s"}])

    async def never(*_: Any) -> None:
        raise AssertionError("the application is not called")

    async def handshake() -> List[Any]:
        sent: List[Any] = []

        async def receive() -> Any:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "websocket", "path": "/", "headers": [], "client": ("192.0.2.7", 1)}
        await TollkeeperMiddleware(never, limiter=limiter)(scope, receive, send)
        return sent

    assert [message["type"] for message in asyncio.run(handshake())] == ["websocket.close"]


def call(middleware: Any, **scope: Any) -> List[Any]:
    """Sends one request to an ASGI application in this process."""

    async def run() -> List[Any]:
        sent: List[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        whole = {"type": "http", "method": "GET", "path": "/", "raw_path": b"/", "query_string": b"", "headers": []}
        await middleware({**whole, "client": ("192.0.2.7", 1), **scope}, receive, send)
        return sent

    return asyncio.run(run())


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"X-RateLimit-Limit", b"forged")]})
    await send({"type": "http.response.body", "body": b"hello"})


def test_facts_and_cost_of_the_application_are_used() -> None:
    from tollkeeper.asgi import TollkeeperMiddleware
    from tollkeeper.testing import testing_async

    limiter, _clock = testing_async(limits=[{"name": "per-user", "by": "user", "rate": "5/day"}])

    async def facts(scope: Any) -> Any:
        return {"user": dict(scope["headers"])[b"user"].decode("latin-1")}

    app = TollkeeperMiddleware(hello, limiter=limiter, facts=facts, cost=lambda scope: 3)
    first = call(app, headers=[(b"user", b"alice")])[0]
    assert first["status"] == 200
    names = [name for name, _value in first["headers"]]
    assert names.count(b"x-ratelimit-limit") == 1 and b"X-RateLimit-Limit" not in names
    assert call(app, headers=[(b"user", b"alice")])[0]["status"] == 429
    assert call(app, headers=[(b"user", b"bob")])[0]["status"] == 200
    assert call(app, headers=[(b"user", b"x" * 2_000)])[0]["status"] == 500, "the application passed it on unchecked"


def test_callback_that_raises_charges_nothing() -> None:
    from tollkeeper.asgi import TollkeeperMiddleware
    from tollkeeper.testing import testing_async

    limiter, _clock = testing_async(limits=[{"name": "all", "rate": "5/day"}])

    def broken(scope: Any) -> Any:
        raise KeyError("user")

    with pytest.raises(KeyError):
        call(TollkeeperMiddleware(hello, limiter=limiter, facts=broken))
    invalid: List[Any] = [{"user": None}, {"user": []}, ["user"], {"user": 1.5}]
    for facts in invalid:
        with pytest.raises(TollkeeperError, match="invalid_fact"):
            call(TollkeeperMiddleware(hello, limiter=limiter, facts=lambda scope, facts=facts: facts))
    assert asyncio.run(limiter.usage({}))[0].remaining == 5


def test_middlewares_ask_for_the_right_limiter() -> None:
    from tollkeeper.asgi import TollkeeperMiddleware as Asgi
    from tollkeeper.testing import testing, testing_async
    from tollkeeper.wsgi import TollkeeperMiddleware as Wsgi

    with pytest.raises(TypeError, match="AsyncLimiter"):
        Asgi(hello, limiter=testing(limits=[])[0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Limiter"):
        Wsgi(None, limiter=testing_async(limits=[])[0])  # type: ignore[arg-type]
