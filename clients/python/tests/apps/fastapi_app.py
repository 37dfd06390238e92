"""A FastAPI application behind the middleware: under uvicorn."""

import asyncio
import os
from typing import Any, AsyncIterator, Dict

from fastapi import Depends, FastAPI, Request, Response, WebSocket
from fastapi.responses import StreamingResponse

from tollkeeper import AsyncLimiter
from tollkeeper.fastapi import TollkeeperMiddleware, limited

app = FastAPI()
app.add_middleware(TollkeeperMiddleware, limiter=AsyncLimiter(os.environ["TOLLKEEPER_CONFIG"]))
reached = 0


@app.get("/")
@app.get("/burst")
async def hello() -> Dict[str, int]:
    global reached
    reached += 1
    return {"reached": reached}


@app.get("/reached")
async def how_many() -> Dict[str, int]:
    return {"reached": reached}


@app.post("/login")
async def login(request: Request, response: Response) -> Dict[str, Any]:
    sent = await request.json()
    response.status_code = 200 if sent["password"] == "right" else 401
    return sent


@app.get("/stream")
async def stream() -> StreamingResponse:
    async def chunks() -> AsyncIterator[bytes]:
        while True:
            yield b"chunk\n"
            await asyncio.sleep(0.01)

    return StreamingResponse(chunks())


@app.get("/search", dependencies=[Depends(limited(action="search", user=lambda request: request.headers["x-user"]))])
async def search() -> str:
    return "found"


@app.websocket("/socket")
async def socket(websocket: WebSocket) -> None:
    await websocket.accept()
    await websocket.send_text("hello")
    await websocket.receive()
