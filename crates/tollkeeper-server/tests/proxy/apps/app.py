"""An ASGI application without a framework, as the tests of the proxy need it."""


async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    headers = dict(scope["headers"])
    if scope["path"] == "/cached" and headers.get(b"if-none-match") == b'"1"':
        await send({"type": "http.response.start", "status": 304, "headers": [(b"etag", b'"1"')]})
        await send({"type": "http.response.body"})
    elif scope["path"] == "/cached":
        fields = [(b"etag", b'"1"'), (b"content-length", b"5")]
        await send({"type": "http.response.start", "status": 200, "headers": fields})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else b"fresh"})
    else:
        # Every part of the body is sent back before the next one is read.
        await send({"type": "http.response.start", "status": 200, "headers": []})
        more = True
        while more:
            event = await receive()
            more = event.get("more_body", False)
            await send({"type": "http.response.body", "body": event.get("body", b""), "more_body": more})
