"""Known bypasses of rate limiters, sent to uvicorn over raw sockets: no spelling has a count of its own."""

import json
import socket
import threading
from pathlib import Path
from typing import Any, Dict

import pytest
import uvicorn

from tollkeeper import AsyncLimiter
from tollkeeper.asgi import TollkeeperMiddleware

ROWS = json.loads((Path(__file__).parents[2] / "conformance" / "bypasses.json").read_text())


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def status(address: Any, request: str) -> int:
    with socket.create_connection(address, 30) as connection:
        connection.sendall(request.replace("\r\n", "\r\nConnection: close\r\n", 1).encode("latin-1"))
        received = b""
        while b"\r\n" not in received:
            data = connection.recv(4096)
            assert data, "the connection was closed"
            received += data
    return int(received.split(b" ", 2)[1])


@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_no_spelling_has_a_count_of_its_own(row: Dict[str, Any]) -> None:
    app = TollkeeperMiddleware(answer, limiter=AsyncLimiter(**row["policy"]))
    # uvicorn would read X-Forwarded-For itself.
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", proxy_headers=False))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        running = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        running.start()
        try:
            answered = [status(address, request["request"]) for request in row["requests"]]
        finally:
            server.should_exit = True
            running.join(30)
    assert answered == [request["status"] for request in row["requests"]]
