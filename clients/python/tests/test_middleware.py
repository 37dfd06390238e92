"""What the middlewares do with bodies, peers, delays and cancelled requests, without a web server."""

import asyncio
import io
import signal
from typing import Any, Dict, List

import pytest
from harness import Redis, until

from tollkeeper import AsyncLimiter
from tollkeeper.testing import testing, testing_async

BY_EMAIL: Dict[str, Any] = {"http": {"facts": {"email": {"from": "body.email"}}}}
LARGE = b'{"email":"a@b.c","rest":"' + b"x" * 200_000 + b'"}'


class Stream(io.RawIOBase):
    """A body that arrives in pieces, and counts how much of it was read."""

    def __init__(self, content: bytes, fails: bool = False) -> None:
        self._content = io.BytesIO(content)
        self._fails = fails
        self.taken = 0

    def read(self, size: int = -1) -> bytes:
        assert size >= 0, "a body is read in bounded pieces"
        data = self._content.read(min(size, 5_000))
        if not data and self._fails:
            raise OSError("the client is gone")
        self.taken += len(data)
        return data


def environ(stream: Any, **more: Any) -> Dict[str, Any]:
    from werkzeug.test import EnvironBuilder

    made = EnvironBuilder(method="POST", path="/", environ_overrides={"REMOTE_ADDR": "192.0.2.7"}).get_environ()
    made.pop("CONTENT_LENGTH", None)
    chunked = {"HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input_terminated": True, "CONTENT_TYPE": "application/json"}
    return {**made, **chunked, "wsgi.input": stream, **more}


def wsgi(mode: str, stream: Any, **more: Any) -> "tuple[str, bytes]":
    """Status of a request to an application behind a limit by a field of the body, and what the application read."""
    from tollkeeper.wsgi import TollkeeperMiddleware

    limits = [{"name": "per-email", "by": "email", "rate": "5/day", "mode": mode}]
    limiter, _clock = testing(limits=limits, **BY_EMAIL)
    read = bytearray()

    def application(environ: Dict[str, Any], start_response: Any) -> List[bytes]:
        try:
            while True:
                data = environ["wsgi.input"].read(4_000)
                if not data:
                    break
                read.extend(data)
        except OSError:
            read.extend(b"(broken)")
        start_response("200 OK", [])
        return []

    statuses: List[str] = []
    list(TollkeeperMiddleware(application, limiter)(environ(stream, **more), lambda status, *_: statuses.append(status)))
    return statuses[0][:3], bytes(read)


def test_large_chunked_body_reaches_the_application_complete() -> None:
    assert wsgi("shadow", Stream(LARGE)) == ("200", LARGE)
    status, read = wsgi("enforce", Stream(LARGE))
    assert (status, read) == ("413", b"")
    small = b'{"email":"a@b.c"}'
    assert wsgi("enforce", Stream(small)) == ("200", small)


def test_broken_body_is_broken_for_the_application_too() -> None:
    start = LARGE[:9_000]
    status, read = wsgi("shadow", Stream(start, fails=True))
    assert status == "200" and read.endswith(b"(broken)") and start.startswith(read[:4_000])
    assert wsgi("shadow", Stream(start), CONTENT_LENGTH="9001") == ("200", start)
    assert wsgi("enforce", Stream(start), CONTENT_LENGTH="9001")[0] == "400"


def test_flask_reads_no_more_than_it_needs() -> None:
    from flask import Flask, request

    from tollkeeper.flask import Tollkeeper

    def app(mode: str) -> Flask:
        limits = [{"name": "per-email", "by": "email", "rate": "5/day", "mode": mode}]
        app = Flask(__name__)
        Tollkeeper(app, limiter=testing(limits=limits, **BY_EMAIL)[0])
        app.post("/")(lambda: str(len(request.get_data())))
        return app

    stream = Stream(LARGE)
    with app("enforce").request_context(environ(stream)) as context:
        assert context.app.full_dispatch_request().status_code == 413
    assert stream.taken <= 65_537
    with app("shadow").request_context(environ(Stream(LARGE))) as context:
        assert context.app.full_dispatch_request().get_data() == str(len(LARGE)).encode()


def test_peer_without_an_address_concerns_only_limits_by_ip() -> None:
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route
    from starlette.testclient import TestClient

    from tollkeeper.asgi import TollkeeperMiddleware

    def statuses(by: str) -> List[int]:
        limiter, _clock = testing_async(limits=[{"name": "one", "by": by, "rate": "1/day"}])
        app = Starlette(routes=[Route("/", lambda request: PlainTextResponse("hello"))])
        app.add_middleware(TollkeeperMiddleware, limiter=limiter)
        client = TestClient(app)  # its address is "testclient"
        return [client.get("/").status_code for _ in range(2)]

    assert statuses("method") == [200, 429]
    assert statuses("ip") == [500, 500]


def test_dependency_waits_for_the_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastapi import Depends, FastAPI
    from fastapi.testclient import TestClient

    import tollkeeper.fastapi

    waited: List[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    class Recorded:
        """asyncio with a `sleep` that is recorded."""

        def __getattr__(self, name: str) -> Any:
            return sleep if name == "sleep" else getattr(asyncio, name)

    monkeypatch.setattr(tollkeeper.fastapi, "asyncio", Recorded())
    shaped = {"name": "shaped", "rate": "10/s", "algorithm": "leaky-bucket", "burst": 3}
    limiter, _clock = testing_async(limits=[shaped])
    app = FastAPI()
    app.get("/", dependencies=[Depends(tollkeeper.fastapi.limited(limiter=limiter))])(lambda: "hello")
    client = TestClient(app)
    assert [client.get("/").status_code for _ in range(3)] == [200] * 3
    assert waited == [0.1, 0.2]


def test_middlewares_wait_for_the_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    import tollkeeper.wsgi

    shaped = {"name": "shaped", "rate": "10/s", "algorithm": "leaky-bucket", "burst": 3}
    limiter, _clock = testing(limits=[shaped])
    order: List[Any] = []

    class Recorded:
        """time with a `sleep` that is recorded."""

        sleep = staticmethod(order.append)

    def application(environ: Dict[str, Any], start_response: Any) -> List[bytes]:
        order.append("handled")
        start_response("200 OK", [])
        return []

    monkeypatch.setattr(tollkeeper.wsgi, "time", Recorded())
    app = tollkeeper.wsgi.TollkeeperMiddleware(application, limiter)
    for _ in range(3):
        list(app(environ(io.BytesIO()), lambda *_: None))
    assert order == ["handled", 0.1, "handled", 0.2, "handled"]


def test_cancelled_request_gives_its_slot_back() -> None:
    """A request that is cancelled while Redis decides holds no slot afterwards."""
    from tollkeeper._engine import Mailbox
    from tollkeeper.asgi import TollkeeperMiddleware

    own = Redis()
    slots = [{"name": "slots", "by": "ip", "algorithm": "concurrency", "limit": 1, "ttl": "1h"}]

    async def statuses() -> None:
        limiter = AsyncLimiter(limits=slots, store=own.url, redis={"prefix": "cancel", "deadline": "30s"})

        async def application(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})

        app = TollkeeperMiddleware(application, limiter)

        async def request() -> int:
            sent: List[Any] = []

            async def send(message: Any) -> None:
                sent.append(message)

            async def receive() -> Any:
                return {"type": "http.request"}

            scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "client": ("192.0.2.7", 1)}
            await app(scope, receive, send)
            return int(sent[0]["status"])

        assert await request() == 200
        while await request() != 200:
            pass
        own.signal(signal.SIGSTOP)
        waiting = asyncio.create_task(request())
        while not Mailbox.of_this_loop(limiter._at._native)._futures:  # type: ignore[union-attr]
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        own.signal(signal.SIGCONT)
        # Its answer may not have arrived: the next request is decided after it.
        decided = [await request() for _ in range(2)]
        deadline = asyncio.get_running_loop().time() + 30
        while decided[-1] != 200:
            assert asyncio.get_running_loop().time() < deadline, "the slot was not released"
            decided.append(await request())
        await limiter.close()

    try:
        asyncio.run(statuses())
    finally:
        own.signal(signal.SIGCONT)
        own.close()


def test_answer_of_a_cancelled_request_is_ended(redis: Redis) -> None:
    """The answer has arrived, and the task is cancelled before it runs again."""
    from tollkeeper._engine import UNREAD, Mailbox

    slots = [{"name": "slots", "by": "ip", "algorithm": "concurrency", "limit": 1, "ttl": "1h"}]

    async def cancelled() -> None:
        limiter = AsyncLimiter(limits=slots, store=redis.url, redis={"prefix": "arrived", "deadline": "30s"})
        engine: Any = limiter._at
        head = b"GET\n/\n192.0.2.7"
        task = asyncio.create_task(engine.visit_async(head, "", UNREAD))
        await asyncio.sleep(0)
        mailbox = Mailbox.of_this_loop(engine._native)
        [(future, _cancelled)] = mailbox._futures.values()

        def deliver_and_cancel() -> None:
            mailbox._deliver()
            task.cancel()

        asyncio.get_running_loop().add_reader(mailbox._mail.fileno(), deliver_and_cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not future.cancelled()
        while not (await engine.visit_async(head, "", UNREAD)).startswith("pass\n"):
            await asyncio.sleep(0)
        await limiter.close()

    asyncio.run(asyncio.wait_for(cancelled(), 60))


def test_storage_for_limits_follows_the_failure_policy() -> None:
    from limits import parse
    from limits.strategies import FixedWindowRateLimiter, MovingWindowRateLimiter

    from tollkeeper.limits import TollkeeperStorage

    for policy, admitted in (("allow", True), ("deny", False)):
        own = Redis()
        settings = {"on_store_failure": policy, "redis": {"deadline": "50ms"}}
        storage = TollkeeperStorage(f"tollkeeper+{own.url}", **settings)
        own.close()
        for strategy in (FixedWindowRateLimiter(storage), MovingWindowRateLimiter(storage)):
            assert [strategy.hit(parse("2/minute"), "alice") for _ in range(4)] == [admitted] * 4
        until(lambda: not storage.check(), "the store does not answer")
