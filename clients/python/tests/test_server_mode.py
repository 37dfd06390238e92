"""A client of a server: the standard library only, with a policy for a server that does not answer."""

import asyncio
import json
import logging
import socket
import subprocess
import sys
import threading
import time
from typing import Any, Iterator, List, Tuple

import pytest
from harness import at_once, python, server

from tollkeeper import AsyncLimiter, Limiter, TollkeeperError

POLICY = """
admin: { token_sha256: 2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b }
limits:
  - { name: per-user, by: user, rate: 5/day, algorithm: sliding-log }
  - { name: tokens, by: key, rate: 1000/day, algorithm: fixed-window, cost: tokens }
  - { name: exports, by: tenant, algorithm: concurrency, limit: 1, ttl: 60s }
  - { name: shaped, by: shaped, rate: 1/hour, algorithm: leaky-bucket, burst: 2 }
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server(POLICY) as url:
        yield url


def test_every_call_works(url: str) -> None:
    with Limiter(server=url, token="secret", timeout=10) as limiter:
        first = limiter.check({"user": "all", "admin": True, "n": 7}, cost=2)
        assert (first.allowed, first.binding, first.limit, first.remaining) == (True, "per-user", 5, 3)
        assert limiter.headers(first)["ratelimit"].startswith('"per-user";r=3;t=')
        refused = limiter.check({"user": "all"}, cost=4)
        assert not refused and refused.reason and refused.charge is None and not refused.never
        assert refused.retry_after and 0 < refused.retry_after <= 86400
        assert limiter.check({"user": "all"}, cost=6).never
        assert limiter.peek({"user": "all"}).remaining == 3
        assert [state.remaining for state in limiter.usage({"user": "all"})] == [3]
        assert first.charge and limiter.refund(first.charge) and not limiter.refund(first.charge)
        reserved = limiter.reserve({"key": "k", "tokens": 400}, ttl=30)
        assert reserved.charge and limiter.settle(reserved.charge, facts={"tokens": 100})
        assert limiter.usage({"key": "k"})[0].remaining == 900
        assert limiter.forget("tokens", {"key": "k"}) and not limiter.forget("tokens", {"key": "k"})
        assert [limit["applies"] for limit in limiter.explain({"user": "all"})] == [True, False, False, False]
        assert limiter.policy()["source"] == "file"
        with limiter.acquire({"tenant": "t"}) as held:
            assert held and held.renew()
            assert not limiter.acquire({"tenant": "t"})
        assert not held.release() and not held.renew()
        assert limiter.check({"shaped": "s"}).delay == 0 and limiter.check({"shaped": "s"}).delay > 3000


def test_every_call_works_in_asyncio(url: str) -> None:
    async def calls() -> None:
        async with AsyncLimiter(server=url, token="secret", timeout=10) as limiter:
            decisions = await asyncio.gather(*(limiter.check({"user": "async"}) for _ in range(50)))
            assert sum(map(bool, decisions)) == 5
            assert not await limiter.peek({"user": "async"})
            assert (await limiter.usage({"user": "async"}))[0].remaining == 0
            charge = next(decision.charge for decision in decisions if decision)
            assert charge and await limiter.refund(charge)
            reserved = await limiter.reserve({"key": "a", "tokens": 400})
            assert reserved.charge and await limiter.settle(reserved.charge, facts={"tokens": 1})
            assert await limiter.forget("tokens", {"key": "a"})
            assert len(await limiter.explain({})) == 4 and (await limiter.policy())["version"] == 1
            async with limiter.acquire({"tenant": "a"}) as held:
                assert held and await held.renew()
                assert not await limiter.acquire({"tenant": "a"})
            assert not await held.release()

    asyncio.run(calls())


def test_threads_share_the_count_of_the_server(url: str) -> None:
    limiter = Limiter(server=url, timeout=10)
    decisions = at_once([lambda: limiter.check({"user": "threads"})] * 40)
    assert sum(map(bool, decisions)) == 5


def test_extension_is_never_imported(url: str) -> None:
    code = (
        "import sys; from tollkeeper import Limiter; "
        f"print(Limiter(server={url!r}, timeout=10).check({{'user': 'pure'}}).allowed, 'tollkeeper._native' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["True", "False"]


def test_waiting_ends_with_a_refusal_at_the_timeout(url: str) -> None:
    limiter = Limiter(server=url, timeout=10)
    while limiter.check({"user": "wait"}):
        pass
    assert not limiter.until_allowed({"user": "wait"}, timeout=1)


def test_errors_of_the_server_are_raised(url: str) -> None:
    cases: List[Tuple[Limiter, str]] = [
        (Limiter(server=url + "/nowhere", timeout=10), "not_found"),
        (Limiter(server=url, token="wrong", timeout=10), "unauthorized"),
    ]
    for limiter, code in cases:
        with pytest.raises(TollkeeperError) as raised:
            limiter.usage({"user": "x"}) if code == "unauthorized" else limiter.check({"user": "x"})
        assert raised.value.code == code
    with pytest.raises(TollkeeperError, match="unknown_charge"):
        Limiter(server=url, timeout=10).refund("nonsense")


class Scripted:
    """A server that sends fixed bytes to every request."""

    def __init__(self, *pieces: bytes, keep: bool = False, answers: float = float("inf")) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.connections = 0
        self.requests = 0
        self.closed = threading.Semaphore(0)
        self._answers = answers
        self._pieces = pieces
        self._keep = keep
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self.listener.accept()
            self.connections += 1
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            while connection.recv(65536):
                self.requests += 1
                if self.requests > self._answers:
                    break
                for piece in self._pieces:
                    connection.sendall(piece)
                if not self._keep:
                    break
        self.closed.release()


ADMITTED = json.dumps(
    {"allowed": True, "binding": None, "retry_after": None, "delay": 0, "degraded": None, "charge": None, "limits": []}
).encode()
OK = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s"


@pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([OK % (len(ADMITTED), ADMITTED)], "admitted"),
        ([bytes([byte]) for byte in OK % (len(ADMITTED), ADMITTED)], "admitted"),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", OK % (len(ADMITTED), ADMITTED)], "admitted"),
        ([b"HTTP/1.0 200 OK\r\n\r\n" + ADMITTED], "admitted"),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n"
          % (ADMITTED[:5], len(ADMITTED) - 5, ADMITTED[5:])], "admitted"),
        ([OK % (2, b"{}")], "unexpected_answer"),
        ([OK % (4, b"true")], "unexpected_answer"),
        ([OK % (5, b"hello")], "unexpected_answer"),
        ([OK % (16, b'{"allowed":"no"}')], "unexpected_answer"),
        ([b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n"], "unexpected_answer"),
        ([b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nslow"], "unexpected_answer"),
        ([b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n"], "unexpected_answer"),
        ([OK % (len(ADMITTED) + 1, ADMITTED)], "unavailable"),
        ([OK % (len(ADMITTED) - 1, ADMITTED)], "unavailable"),
        ([b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n"], "unavailable"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n"], "unavailable"),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], "unavailable"),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"], "unavailable"),
        ([], "unavailable"),
    ],
)  # fmt: skip
def test_any_answer_is_a_decision_or_an_error(kind: Any, pieces: List[bytes], expected: str) -> None:
    limiter = kind(server=Scripted(*pieces).url, on_unavailable="deny", timeout=10)

    def check() -> Any:
        decision = limiter.check({"user": "x"})
        return asyncio.run(decision) if kind is AsyncLimiter else decision

    if expected == "unexpected_answer":
        with pytest.raises(TollkeeperError, match=expected):
            check()
    else:
        decision = check()
        assert (decision.allowed, decision.degraded) == ((True, None) if expected == "admitted" else (False, "deny"))


def test_connections_are_kept_and_replaced() -> None:
    kept = Scripted(OK % (len(ADMITTED), ADMITTED), keep=True)
    limiter = Limiter(server=kept.url, timeout=10)
    assert all(limiter.check({}) for _ in range(5)) and kept.connections == 1
    # This server closes each connection after its answer, without saying so.
    closing = Scripted(OK % (len(ADMITTED), ADMITTED))
    limiter = Limiter(server=closing.url, timeout=10, on_unavailable="deny")
    for _ in range(5):
        assert limiter.check({}) and closing.closed.acquire(timeout=30)
    assert closing.connections == 5


def test_call_whose_connection_breaks_is_not_sent_again() -> None:
    """The server has read the second call, and may have charged it."""
    server = Scripted(OK % (len(ADMITTED), ADMITTED), keep=True, answers=1)
    limiter = Limiter(server=server.url, timeout=10, on_unavailable="deny")
    assert limiter.check({})
    assert limiter.check({}).degraded == "deny"
    assert (server.requests, server.connections) == (2, 1)


@pytest.mark.parametrize("policy", ["allow", "deny"])
def test_silent_server_is_left_alone_after_five_failures(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        limiter = Limiter(server=url, on_unavailable=policy)
        with caplog.at_level(logging.ERROR):
            decisions = [limiter.check({}) for _ in range(200)]
        assert all(decision.allowed == (policy == "allow") for decision in decisions)
        assert {decision.degraded for decision in decisions} == {policy}
        waited = 0
        listener.setblocking(False)
        while True:
            try:
                listener.accept()[0].close()
                waited += 1
            except BlockingIOError:
                break
        # Five, and one more for each second that the other 195 took.
        assert 5 <= waited <= 10
        lines = [record for record in caplog.records if "did not answer" in record.message]
        assert 1 <= len(lines) <= waited
        with pytest.raises(TollkeeperError, match="unavailable"):
            limiter.usage({})


def test_server_that_comes_back_is_asked_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    limiter = Limiter(server=f"http://{address[0]}:{address[1]}", on_unavailable="deny")
    assert not any(limiter.check({}) for _ in range(6))
    scripted = Scripted(OK % (len(ADMITTED), ADMITTED))
    limiter._at.client._endpoint.port = scripted.listener.getsockname()[1]  # type: ignore[union-attr]
    end = time.monotonic() + 30
    while not limiter.check({}):
        assert time.monotonic() < end


@pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
def test_failed_store_of_a_server_is_decided_by_policy(kind: Any) -> None:
    body = b'{"error":{"code":"store_unavailable","message":"the store did not answer","where":null}}'
    failed = Scripted(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body), keep=True)
    limiter = kind(server=failed.url, on_unavailable="deny", timeout=10)

    def result(call: Any) -> Any:
        async def awaited() -> Any:
            return await call()

        return asyncio.run(awaited()) if kind is AsyncLimiter else call()

    assert result(lambda: limiter.check({})).degraded == "deny"
    assert result(lambda: limiter.peek({})).degraded == "deny"
    with pytest.raises(TollkeeperError, match="store_unavailable"):
        result(lambda: limiter.usage({}))


def test_slot_of_a_lost_server_ends_with_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    with server(POLICY) as url:
        limiter = Limiter(server=url, timeout=10)
        held = limiter.acquire({"tenant": "t"})
        assert held
    with held:
        pass
    assert "a slot is not released" in caplog.text

    async def entered() -> None:
        with server(POLICY) as url:
            acquiring = AsyncLimiter(server=url, timeout=10).acquire({"tenant": "t"})
            assert await acquiring.__aenter__()
        await acquiring.__aexit__(None, None, None)

    caplog.clear()
    asyncio.run(entered())
    assert "a slot is not released" in caplog.text


def test_fact_named_limit_does_not_replace_the_limit(url: str) -> None:
    limiter = Limiter(server=url, token="secret", timeout=10)
    request = limiter._at.client._endpoint.request(  # type: ignore[union-attr]
        "forget", {"limit": "tokens", "facts": {"limit": "per-user"}}
    )
    assert request.startswith(b"DELETE /v1/state?limit=tokens&limit=per-user HTTP/1.1")


def test_descriptors_above_1023_are_used(url: str) -> None:
    code = f"""
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (2000, max(2000, resource.getrlimit(resource.RLIMIT_NOFILE)[1])))
opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
from tollkeeper import Limiter
limiter = Limiter(server={url!r}, timeout=30, on_unavailable="deny")
print([limiter.check({{"shaped": str(n)}}).degraded for n in range(3)])
"""
    assert python(code).strip() == "[None, None, None]"


def test_constructor_says_what_it_takes() -> None:
    cases: List[Tuple[dict, str]] = [
        ({}, "one of"),
        ({"config": "a.yaml", "server": "http://x"}, "one of"),
        ({"server": "http://x", "store": "memory://"}, "belong to the server"),
        ({"server": "http://x", "on_unavailable": "maybe"}, "on_unavailable"),
        ({"server": "http://x", "timeout": 0}, "timeout"),
        ({"config": "a.yaml", "token": "t"}, "token"),
        ({"config": "a.yaml", "headers": []}, "config file"),
    ]
    for arguments, message in cases:
        with pytest.raises(TypeError, match=message):
            Limiter(**arguments)
    for url in ("127.0.0.1:8080", "ftp://x", "http://user:pass@x", "http://x?q"):
        with pytest.raises(TollkeeperError, match="invalid_config"):
            Limiter(server=url)
    with pytest.raises(TollkeeperError, match="invalid_config"):
        Limiter(server="http://x", token="a\r\nb: c")


def test_closed_limiter_raises(url: str) -> None:
    limiter = Limiter(server=url)
    limiter.close()
    limiter.close()
    with pytest.raises(TollkeeperError, match="closed"):
        limiter.check({})


def asgi(limiter: AsyncLimiter, **options: Any) -> Any:
    """A client of an ASGI application behind a server."""
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route
    from starlette.testclient import TestClient

    from tollkeeper.asgi import TollkeeperMiddleware

    app = Starlette(routes=[Route("/", lambda request: PlainTextResponse("hello"))])
    app.add_middleware(TollkeeperMiddleware, limiter=limiter, **options)
    return TestClient(app, client=("192.0.2.7", 1))


def wsgi(limiter: Limiter, **options: Any) -> Any:
    """The same for WSGI."""
    from flask import Flask

    from tollkeeper.wsgi import TollkeeperMiddleware

    app = Flask(__name__)
    app.get("/")(lambda: "hello")
    app.wsgi_app = TollkeeperMiddleware(app.wsgi_app, limiter=limiter, **options)  # type: ignore[method-assign]
    return app.test_client()


@pytest.mark.parametrize(("kind", "client"), [(AsyncLimiter, asgi), (Limiter, wsgi)])
def test_middleware_asks_the_server(kind: Any, client: Any) -> None:
    policy = """
limits:
  - { name: per-ip, by: [ip, method], rate: 5/day, algorithm: sliding-log }
  - { name: hidden, by: user, rate: 2/day, algorithm: sliding-log, headers: false }
"""
    with server(policy) as url:
        app = client(kind(server=url, timeout=10))
        answers = [app.get("/") for _ in range(6)]
        assert [answer.status_code for answer in answers] == [200] * 5 + [429]
        assert answers[0].headers["x-ratelimit-remaining"] == "4"
        assert answers[5].headers["content-type"] == "application/problem+json"
        assert "retry-after" in answers[5].headers
        app = client(kind(server=url, timeout=10), facts=lambda request: {"user": "u", "method": "own"}, cost=lambda _: 2)
        answers = [app.get("/") for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 429]
        assert "hidden" not in answers[1].text, "a limit that is not shown"
        too_long = client(kind(server=url, timeout=10), facts=lambda request: {"user": "x" * 2_000})
        assert too_long.get("/").status_code == 400
        assert client(kind(server=url + "/nowhere", timeout=10)).get("/").status_code == 500, "never a pass"
    for policy, status in (("allow", 200), ("deny", 503)):
        answer = client(kind(server="http://127.0.0.1:1", on_unavailable=policy)).get("/")
        assert answer.status_code == status and ("retry-after" in answer.headers) == (status == 503)
