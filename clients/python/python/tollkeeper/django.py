"""Middleware for Django, under WSGI and ASGI.

    MIDDLEWARE = ["tollkeeper.django.TollkeeperMiddleware", …]
    TOLLKEEPER = {"config": BASE_DIR / "tollkeeper.yaml"}
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Awaitable, Callable, Dict, Optional, Union

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured, RequestDataTooBig
from django.http import HttpRequest, HttpResponse
from django.http.request import UnreadablePostError
from django.utils.module_loading import import_string

from . import _visit
from ._engine import BROKEN, MAX_BODY, TOO_LARGE, Body, raw
from ._limiter import AsyncLimiter, Limiter
from ._visit import NeedsBody, Outcome, Passed, Refused, Request

#: Both limiters of a process share one memory store.
NAME = "tollkeeper.django"


class TollkeeperMiddleware:
    """Decides each request before its view runs.

    `settings.TOLLKEEPER` has the arguments of a `Limiter`, and may have `facts` and `cost`: the dotted names of
    functions of the request, for what only the application knows.
    """

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        options = getattr(settings, "TOLLKEEPER", None)
        if not isinstance(options, dict):
            raise ImproperlyConfigured('set TOLLKEEPER = {"config": BASE_DIR / "tollkeeper.yaml"} in the settings')
        options = dict(options)
        self._facts = function(options.pop("facts", None))
        self._cost = function(options.pop("cost", None))
        if "server" not in options:
            options.setdefault("name", NAME)
        self._get_response = get_response
        self._is_async = iscoroutinefunction(get_response)
        self._limiter: Any = AsyncLimiter(**options) if self._is_async else Limiter(**options)
        if self._is_async:
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> Union[HttpResponse, Awaitable[HttpResponse]]:
        return self._call_async(request) if self._is_async else self._call(request)

    def _call(self, request: HttpRequest) -> HttpResponse:
        seen, own = self._seen(request), self._own(request)
        outcome = _visit.visit(self._limiter, seen, own)
        if isinstance(outcome, NeedsBody):
            outcome = _visit.visit(self._limiter, seen, own, body_of(request))
        if isinstance(outcome, Passed):
            try:
                if outcome.delay:
                    time.sleep(outcome.delay)
                response = self._get_response(request)
            except BaseException:  # the worker ends
                _visit.gone(self._limiter, outcome.ticket)
                raise
            return self._finish(outcome, response)
        return refusal(outcome)

    async def _call_async(self, request: HttpRequest) -> HttpResponse:
        seen, own = self._seen(request), self._own(request)
        outcome = await _visit.visit_async(self._limiter, seen, own)
        if isinstance(outcome, NeedsBody):
            outcome = await _visit.visit_async(self._limiter, seen, own, body_of(request))
        if isinstance(outcome, Passed):
            try:
                if outcome.delay:
                    await asyncio.sleep(outcome.delay)
                response = await self._get_response(request)
            except BaseException:  # the client is gone
                _visit.gone(self._limiter, outcome.ticket)
                raise
            return self._finish(outcome, response)
        return refusal(outcome)

    @staticmethod
    def _seen(request: HttpRequest) -> Request:
        scope = getattr(request, "scope", None)
        return Request.of_environ(request.environ) if scope is None else Request.of_scope(scope)

    def _own(self, request: HttpRequest) -> Dict[str, Any]:
        return _visit.own(self._facts and self._facts(request), self._cost and self._cost(request))

    def _finish(self, passed: Passed, response: Any) -> HttpResponse:
        """Reports the response, and its end."""
        for name, value in passed.headers:
            response.headers[name] = value
        if passed.ticket:
            _visit.answered(self._limiter, passed.ticket, response.status_code)
            close = response.close

            def closed() -> None:
                try:
                    close()
                finally:
                    _visit.gone(self._limiter, passed.ticket)

            response.close = closed
        return response


def function(name: Optional[str]) -> Optional[Callable[[HttpRequest], Any]]:
    return import_string(name) if isinstance(name, str) else name


def body_of(request: HttpRequest) -> Body:
    try:
        if int(request.META.get("CONTENT_LENGTH") or 0) > MAX_BODY:
            return TOO_LARGE
        return raw(request.body)
    except RequestDataTooBig:
        return TOO_LARGE
    except (UnreadablePostError, ValueError):
        return BROKEN


def refusal(outcome: Outcome) -> HttpResponse:
    assert isinstance(outcome, Refused), "the body was read"
    return HttpResponse(outcome.body, status=outcome.status, headers=dict(outcome.headers))
