"""Real servers for the tests: Redis, Tollkeeper, uvicorn and gunicorn, each on a socket of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

APPS = Path(__file__).parent / "apps"

#: The limits of every application in `apps`.
POLICY = """
store: %(store)s
redis: { prefix: %(prefix)s, deadline: 1s }
retry_after_jitter: 0%%
http:
  routes: ["/", "/burst", "/login", "/stream", "/socket", "/search"]
  facts: { email: { from: body.email, normalize: [lowercase, trim] } }
limits:
  - { name: home, when: { route: "/" }, by: ip, rate: 5/day, algorithm: sliding-log }
  - { name: burst, when: { route: "/burst" }, rate: 20/day, algorithm: sliding-log }
  - { name: login, when: { route: "/login" }, by: email, rate: 5/day, algorithm: sliding-log, deduct_when: { status: [401] } }
  - { name: streams, when: { route: ["/stream", "/socket"] }, by: ip, algorithm: concurrency, limit: 1, ttl: 60s }
  - { name: search, when: { action: search }, by: user, rate: 2/day, algorithm: sliding-log }
"""


class Answer(NamedTuple):
    status: int
    headers: Dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def until(done: Callable[[], Any], what: str, seconds: float = 30) -> Any:
    """Polls a condition that another process brings about."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        result = done()
        if result:
            return result
        time.sleep(0.01)
    raise AssertionError(f"after {seconds} s: {what}")


@contextlib.contextmanager
def running(command: List[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, **options)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Redis:
    """A Redis server on a Unix socket."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="tk-")
        self.socket = f"{self.folder}/redis.sock"
        self.url = f"redis+unix://{self.socket}"
        self.process: Optional[subprocess.Popen[bytes]] = None
        self.start()

    def start(self) -> None:
        command = ["redis-server", "--port", "0", "--unixsocket", self.socket, "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        until(self._answers, "Redis answers")

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(self.socket)
                connection.sendall(b"PING\r\n")
                return connection.recv(64) == b"+PONG\r\n"
            except OSError:
                return False

    def signal(self, number: int) -> None:
        assert self.process
        self.process.send_signal(number)

    def kill(self) -> None:
        assert self.process
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def config(folder: Path, store: str = "memory://", prefix: str = "tk") -> Path:
    path = folder / f"{prefix}.yaml"
    path.write_text(POLICY % {"store": store, "prefix": prefix})
    return path


class Web:
    """An application under a web server."""

    def __init__(self, address: Tuple[str, int]) -> None:
        self.address = address
        self.name = ""

    def get(self, path: str, **headers: str) -> Answer:
        return self.request("GET", path, None, headers)

    def post(self, path: str, sent: Any) -> Answer:
        return self.request("POST", path, json.dumps(sent).encode(), {"content-type": "application/json"})

    def request(self, method: str, path: str, body: Optional[bytes], headers: Mapping[str, str]) -> Answer:
        connection = http.client.HTTPConnection(*self.address, timeout=30)
        try:
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, names, response.read())
        finally:
            connection.close()

    def raw(self, request: bytes) -> socket.socket:
        """Sends bytes on a connection of their own."""
        connection = socket.create_connection(self.address, 30)
        connection.sendall(request)
        return connection

    def stream(self) -> socket.socket:
        """Opens the endless stream, and returns once its first part has arrived."""
        connection = self.raw(b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        received = b""
        while b"chunk" not in received:
            data = connection.recv(4096)
            assert data, f"the stream ended: {received!r}"
            received += data
        return connection


@contextlib.contextmanager
def web(command: List[str], config: Path, **environment: str) -> Iterator[Web]:
    """Runs a web server on an inherited socket; `{fd}` in the command is its descriptor."""
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        listener.set_inheritable(True)
        fd = listener.fileno()
        words = [sys.executable, "-m"] + [word.replace("{fd}", str(fd)) for word in command]
        environ = {**os.environ, "TOLLKEEPER_CONFIG": str(config), "PYTHONUNBUFFERED": "1", **environment}
        with running(words, cwd=APPS, env=environ, pass_fds=[fd]) as process:
            app = Web(listener.getsockname())

            def answers() -> bool:
                assert process.poll() is None, f"{command[0]} ended"
                # A connection waits in the backlog until the application accepts it.
                return app.get("/reached").status == 200

            until(answers, "the application answers")
            yield app


def uvicorn(app: str) -> List[str]:
    return ["uvicorn", app, "--fd", "{fd}", "--log-level", "warning"]


def gunicorn(app: str, workers: int = 2, *more: str) -> List[str]:
    return ["gunicorn", app, "--bind", "fd://{fd}", "--workers", str(workers), "--log-level", "warning", *more]


@contextlib.contextmanager
def server(policy: str, *arguments: str) -> Iterator[str]:
    """A Tollkeeper server; yields its URL."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tollkeeper.yaml"
        path.write_text(policy)
        command = [os.environ["TOLLKEEPER"], "serve", "--config", str(path), "--http", "127.0.0.1:0"]
        command += ["--grpc", "off", "--resp", "off", *arguments]
        with running(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout
            line = process.stdout.readline().decode()
            yield "http://" + line.split("http=")[1].strip()


def at_once(calls: List[Callable[[], Any]]) -> List[Any]:
    """Calls all of them in parallel."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def python(code: str, *arguments: str, timeout: float = 60) -> str:
    """Runs a script in a fresh interpreter; it must end by itself."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout
