"""Runs the programs of docs/python.md in order, as one program, and compares what they print."""

import asyncio
import contextlib
import io
import re
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
from harness import Redis, server

PAGE = Path(__file__).parents[3] / "docs/python.md"


def blocks() -> List[Tuple[str, str]]:
    """Kind and text of each block."""
    return re.findall(r"^```(\w+)[^\n]*\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


def test_programs_print_what_the_page_shows(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    programs = blocks()
    [policy] = [text for kind, text in programs if kind == "yaml"]
    Path("tollkeeper.yaml").write_text(policy)
    namespace: Dict[str, Any] = {"__name__": "page"}
    ran = 0
    with server(policy) as url:
        for (kind, text), (next_kind, shown) in zip(programs, [*programs[1:], ("", "")]):
            if kind != "python":
                continue
            text = text.replace("redis://127.0.0.1:6379", redis.url).replace("http://127.0.0.1:8080", url)
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(text, f"{PAGE.name}, program {ran}", "exec"), namespace)
            assert printed.getvalue() == (shown if next_kind == "text" else "")
            ran += 1
            if "remote" in namespace:
                assert namespace.pop("remote").check({"ip": "192.0.2.7"})
                assert namespace.pop("shared").check({"ip": "192.0.2.7"})
            if "async def answer" in text:
                applications(namespace)
                asyncio.run(streams(namespace))
    assert ran == 10


def applications(namespace: Dict[str, Any]) -> None:
    from fastapi.testclient import TestClient

    client = TestClient(namespace["app"], client=("192.0.2.7", 1))
    assert client.get("/").headers["x-ratelimit-limit"] == "1000"
    assert client.get("/report", headers={"x-user": "alice"}).status_code == 200
    assert client.get("/usage/k").json()[0]["name"] == "tokens"
    flask = namespace["flask_app"].test_client()
    assert flask.get("/").headers["x-ratelimit-limit"] == "1000"


async def streams(namespace: Dict[str, Any]) -> None:
    """The budget is charged what was used, also if the client stops reading."""

    async def model(prompt: str) -> Any:
        for text in ("one", "two", "three"):
            yield text, 10

    namespace["model"] = model
    limiter = namespace["limiter"]
    assert [text async for text in namespace["answer"]("k", "hello")] == ["one", "two", "three"]
    assert (await limiter.usage({"api_key": "k"}))[0].remaining == 100_000 - 30
    stopped = namespace["answer"]("k", "hello")
    assert await stopped.__anext__() == "one"
    await stopped.aclose()
    assert (await limiter.usage({"api_key": "k"}))[0].remaining == 100_000 - 40
