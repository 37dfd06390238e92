"""An extension for Flask.

>>> Tollkeeper(app, limiter=Limiter("tollkeeper.yaml"))
"""

from __future__ import annotations

import time
from typing import Any, Callable, Optional

from flask import Flask, Response, g, request

from . import _visit
from ._limiter import Limiter
from ._visit import NeedsBody, Passed, Refused, Request
from ._wire import Facts
from .wsgi import buffered


class Tollkeeper:
    """Decides each request before its view runs. Facts and cost may use `flask.request`.

    Without `limiter`, the arguments of one are read from `app.config["TOLLKEEPER"]`: `{"config": "tollkeeper.yaml"}`.
    """

    limiter: Limiter

    def __init__(
        self,
        app: Optional[Flask] = None,
        limiter: Optional[Limiter] = None,
        facts: Optional[Callable[[], Facts]] = None,
        cost: Optional[Callable[[], int]] = None,
    ) -> None:
        if limiter is not None:
            self.limiter = limiter
        self._facts = facts
        self._cost = cost
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Adds the limits to an application."""
        if not hasattr(self, "limiter"):
            options = app.config.get("TOLLKEEPER")
            if options is None:
                raise TypeError('pass limiter=…, or set app.config["TOLLKEEPER"] = {"config": "tollkeeper.yaml"}')
            self.limiter = Limiter(**options)
        app.extensions["tollkeeper"] = self
        # First, so that a refused request runs no other code of the application.
        app.before_request_funcs.setdefault(None, []).insert(0, self._before)
        app.after_request(self._after)
        app.teardown_request(self._teardown)

    def _before(self) -> Optional[Response]:
        own = _visit.own(self._facts() if self._facts else None, self._cost() if self._cost else None)
        seen = Request.of_environ(request.environ)
        outcome = _visit.visit(self.limiter, seen, own)
        if isinstance(outcome, NeedsBody):
            outcome = _visit.visit(self.limiter, seen, own, buffered(request.environ))
        if isinstance(outcome, Refused):
            return Response(outcome.body, outcome.status, outcome.headers)
        g._tollkeeper = outcome
        if isinstance(outcome, Passed) and outcome.delay:
            time.sleep(outcome.delay)
        return None

    def _after(self, response: Response) -> Response:
        passed: Any = g.pop("_tollkeeper", None)
        if passed is not None:
            for name, value in passed.headers:
                response.headers[name] = value
            _visit.answered(self.limiter, passed.ticket, response.status_code)
            if passed.ticket:
                response.call_on_close(lambda: _visit.gone(self.limiter, passed.ticket))
        return response

    def _teardown(self, error: Optional[BaseException]) -> None:
        # Only if there was no response.
        passed: Any = g.pop("_tollkeeper", None)
        if passed is not None:
            _visit.gone(self.limiter, passed.ticket)
