"""A Flask application under gunicorn: with the extension, or behind the middleware for WSGI."""

import os
import time
from typing import Any, Dict, Iterator, Tuple

from flask import Flask, Response, request

from tollkeeper import Limiter
from tollkeeper.flask import Tollkeeper
from tollkeeper.wsgi import TollkeeperMiddleware

app = Flask(__name__)
limiter = Limiter(os.environ["TOLLKEEPER_CONFIG"])
if os.environ.get("INTERFACE") == "wsgi":
    app.wsgi_app = TollkeeperMiddleware(app.wsgi_app, limiter=limiter)  # type: ignore[method-assign]
else:
    Tollkeeper(app, limiter=limiter)
reached = 0


@app.get("/")
@app.get("/burst")
def hello() -> Dict[str, int]:
    global reached
    reached += 1
    return {"reached": reached}


@app.get("/reached")
def how_many() -> Dict[str, int]:
    return {"reached": reached}


@app.post("/login")
def login() -> Tuple[Any, int]:
    sent = request.get_json()
    return sent, 200 if sent["password"] == "right" else 401


@app.get("/stream")
def stream() -> Response:
    def chunks() -> Iterator[bytes]:
        while True:
            yield b"chunk\n"
            time.sleep(0.01)

    return Response(chunks())
