"""Known bypasses of rate limiters, sent to Starlette under uvicorn over raw sockets: no spelling has a count of its own."""

from pathlib import Path
from typing import Iterator, List

import pytest
from harness import Web, uvicorn, web

POLICY = """
http:
  trusted_proxies: [127.0.0.1, 10.0.0.0/8]
  routes: ["/login", "/users/{id}", "/files/*"]
  facts:
    key: { from: header.x-api-key }
    session: { from: cookie.sid }
    user: { from: query.user }
    email: { from: body.email, normalize: [lowercase, trim, nfkc] }
limits:
  - { name: per-ip, by: ip, unless: { ip: 127.0.0.1 }, rate: 2/day, algorithm: sliding-log }
  - { name: login, when: { route: "/login" }, rate: 2/day, algorithm: sliding-log }
  - { name: per-key, by: key, rate: 2/day, algorithm: sliding-log }
  - { name: per-session, by: session, rate: 2/day, algorithm: sliding-log }
  - { name: per-user, by: user, rate: 2/day, algorithm: sliding-log }
  - { name: per-email, when: { method: POST }, by: email, rate: 2/day, algorithm: sliding-log }
"""


@pytest.fixture()
def app(tmp_path: Path) -> Iterator[Web]:
    path = tmp_path / "tollkeeper.yaml"
    path.write_text(POLICY)
    # uvicorn reads X-Forwarded-For itself unless told not to.
    with web([*uvicorn("fastapi_app:app"), "--no-proxy-headers"], path) as app:
        yield app


def statuses(app: Web, requests: List[bytes]) -> List[int]:
    """The status of each request, on a connection of its own."""
    read = []
    for request in requests:
        with app.raw(request) as connection:
            answer = b""
            while b"\r\n" not in answer:
                data = connection.recv(4096)
                if not data:
                    break
                answer += data
            read.append(int(answer.split(b" ", 2)[1]))
    return read


def get(target: str, *headers: str) -> bytes:
    lines = [f"GET {target} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def post(body: bytes) -> bytes:
    head = f"POST /other HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    return (head + "Content-Type: application/json\r\n\r\n").encode() + body


def limited(app: Web, requests: List[bytes]) -> int:
    """How many of these requests passed; the others were refused."""
    answers = statuses(app, requests)
    refused = [status for status in answers if status in (400, 429)]
    return len(answers) - len(refused)


def test_no_spelling_has_a_count_of_its_own(app: Web) -> None:
    rows = {
        "leftmost address": [
            get("/reached", f"X-Forwarded-For: 198.51.100.{forged}, 203.0.113.9, 10.0.0.2") for forged in range(10)
        ],
        "mapped address": [
            get("/reached", f"X-Forwarded-For: {address}")
            for address in ("203.0.113.10", "::ffff:203.0.113.10", "203.0.113.10:80", "[::ffff:203.0.113.10]:80") * 2
        ],
        "ipv6 network": [get("/reached", f"X-Forwarded-For: 2001:db8::{forged:x}") for forged in range(1, 9)],
        "other address header": [
            get("/reached", "X-Forwarded-For: 203.0.113.11", f"Forwarded: for=198.51.100.{forged}", "X-Real-IP: 8.8.8.8")
            for forged in range(8)
        ],
        "path": [
            get(path)
            for path in ("/login", "/LOGIN", "/login/", "//login", "/./login", "/x/../login", "/%6cogin", "/login;a=b",
                         "/login?x", "/%2e/login", "/login%2F", "/x%2F..%2Flogin")
        ],
        "header": [get("/reached", f"{name}: secret") for name in ("X-Api-Key", "x-api-key", "X-API-KEY") * 2],
        "twice the header": [get("/reached", "X-Api-Key: other", f"X-Api-Key: {forged}") for forged in range(5)],
        "cookie": [
            get("/reached", f"Cookie: {cookie}")
            for cookie in ("sid=s1", 'sid="s1"', "a=b; sid=s1", "sid=%731") * 2
        ],
        "twice the cookie": [get("/reached", f"Cookie: sid=x; sid={forged}") for forged in range(5)],
        "query": [get(f"/reached?{query}") for query in ("user=u", "%75ser=u", "user=%75", "a=b&user=u") * 2],
        "twice the query": [get(f"/reached?user=x&user={forged}") for forged in range(5)],
        "email": [
            post(b'{"email":"%s"}' % email)
            for email in (b"a@b.c", b"A@B.C", b" a@b.c ", "\uff41@b.c".encode(), b"\\u0061@b.c") * 2
        ],
        "twice the email": [post(b'{"email":"x","email":"%d"}' % forged) for forged in range(5)],
    }  # fmt: skip
    for name, requests in rows.items():
        passed = limited(app, requests)
        assert passed == (0 if name.startswith("twice") else 2), name
