"""Prints how Starlette parses a request."""

from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route


async def email(request):
    """The field of a JSON body, whatever its content type."""
    try:
        return (await request.json()).get("email")
    except ValueError:
        return None


def say(route):
    async def endpoint(request):
        return JSONResponse(
            {
                "route": route,
                "path": request.scope["path"],
                "key": request.headers.get("x-api-key"),
                "authorization": request.headers.get("authorization"),
                "session": request.cookies.get("sid"),
                "user": request.query_params.get("user"),
                "email": await email(request),
                "host": request.url.hostname,
            }
        )

    return endpoint


app = Starlette(
    routes=[
        Route("/login", say("/login"), methods=["GET", "POST"]),
        Route("/api/login", say("/api/login")),
        Route("/users/{id}", say("/users/{id}")),
        Route("/users/{id}/export", say("/users/{id}/export")),
        Route("/projects/{id}", say("/projects/{id}")),
        Route("/files/{rest:path}", say("/files/*")),
    ]
)
