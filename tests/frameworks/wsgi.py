"""Prints how a WSGI application parses a request: headers are variables, cookies are parsed by `http.cookies`."""

import json
import os
import re
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler, make_server

ROUTES = [
    ("/login", "/login"),
    ("/api/login", "/api/login"),
    ("/users/{id}", "/users/[^/]+"),
    ("/users/{id}/export", "/users/[^/]+/export"),
    ("/projects/{id}", "/projects/[^/]+"),
    ("/files/*", "/files/.*"),
]


def email(environ):
    """The field of a JSON body or of a form, whatever its content type."""
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    try:
        return json.loads(body).get("email")
    except ValueError:
        return parse_qs(body.decode("latin-1")).get("email", [None])[-1]


def app(environ, start_response):
    path = environ["PATH_INFO"]
    route = next((name for name, pattern in ROUTES if re.fullmatch(pattern, path)), None)
    try:
        session = SimpleCookie(environ.get("HTTP_COOKIE", "")).get("sid")
    except CookieError:
        session = None
    said = {
        "route": route,
        "path": path,
        "key": environ.get("HTTP_X_API_KEY"),
        "authorization": environ.get("HTTP_AUTHORIZATION"),
        "session": session and session.value,
        "user": parse_qs(environ["QUERY_STRING"]).get("user", [None])[-1],
        "host": environ.get("HTTP_HOST"),
        "email": email(environ),
    }
    start_response("200 OK" if route else "404 Not Found", [("Content-Type", "application/json")])
    return [json.dumps(said).encode()]


class Quiet(WSGIRequestHandler):
    def log_message(self, *_):
        pass


make_server("127.0.0.1", int(os.environ["PORT"]), app, handler_class=Quiet).serve_forever()
