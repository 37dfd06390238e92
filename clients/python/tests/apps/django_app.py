"""A Django project in one file: `application` for WSGI, `asgi` for ASGI."""

import json
import os
import time

import django
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.urls import path

settings.configure(
    DEBUG=False,
    SECRET_KEY="only for tests",
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    MIDDLEWARE=["tollkeeper.django.TollkeeperMiddleware"],
    TOLLKEEPER={"config": os.environ["TOLLKEEPER_CONFIG"]},
)
django.setup()

reached = 0


def hello(request: HttpRequest) -> HttpResponse:
    global reached
    reached += 1
    return JsonResponse({"reached": reached})


def how_many(request: HttpRequest) -> HttpResponse:
    return JsonResponse({"reached": reached})


def login(request: HttpRequest) -> HttpResponse:
    sent = json.loads(request.body)
    return JsonResponse(sent, status=200 if sent["password"] == "right" else 401)


def stream(request: HttpRequest) -> StreamingHttpResponse:
    def chunks():
        while True:
            yield b"chunk\n"
            time.sleep(0.01)

    async def async_chunks():
        import asyncio

        while True:
            yield b"chunk\n"
            await asyncio.sleep(0.01)

    return StreamingHttpResponse(async_chunks() if hasattr(request, "scope") else chunks())


urlpatterns = [
    path("", hello),
    path("burst", hello),
    path("reached", how_many),
    path("login", login),
    path("stream", stream),
]

# Only one of them is used in a process: each opens its own limiter.
if os.environ.get("INTERFACE") == "asgi":
    asgi = get_asgi_application()
else:
    application = get_wsgi_application()
