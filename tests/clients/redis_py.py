"""Unmodified redis-py against a server whose policy has one limit: 5 in 10 minutes for each `user`."""

import asyncio
import sys
import threading

import redis
import redis.asyncio

PORT = int(sys.argv[1])


def throttled(replies, burst):
    """Asserts that the first `burst` requests are admitted and the others refused."""
    for index, reply in enumerate(replies):
        limited, limit, remaining, retry, reset = reply
        passes = index < burst
        assert limited == (0 if passes else 1), (index, reply)
        assert limit == burst, (index, reply)
        assert remaining == max(0, burst - 1 - index), (index, reply)
        assert (retry == -1) == passes, (index, reply)
        assert reset > 0, (index, reply)


def version(protocol):
    client = redis.Redis(port=PORT, protocol=protocol, client_name=f"py{protocol}", decode_responses=True)
    assert client.ping() is True
    assert client.echo("hé\r\n") == "hé\r\n"
    assert client.client_getname() == f"py{protocol}"
    assert client.client_id() > 0
    assert client.info()["loading"] == 0
    assert client.config_get("appendonly") == {"appendonly": "no"}
    assert client.command_count() == 16
    assert client.select(0)

    key = f"py{protocol}"
    throttled([client.execute_command("CL.THROTTLE", key, 2, 1, 600) for _ in range(5)], 3)
    assert client.delete(key, "unknown") == 1

    pipeline = client.pipeline(transaction=False)
    for _ in range(150):
        pipeline.execute_command("CL.THROTTLE", key, 99, 1, 600)
    throttled(pipeline.execute(), 100)

    # An error in the middle of a pipeline does not shift the other replies.
    pipeline = client.pipeline(transaction=False)
    pipeline.execute_command("CL.THROTTLE", key + "-x", 1, 1, 600)
    pipeline.execute_command("CL.THROTTLE", key + "-x", 1, 0, 600)
    pipeline.execute_command("PING")
    pipeline.execute_command("CL.THROTTLE", key + "-x", 1, 1, 600)
    first, error, pong, last = pipeline.execute(raise_on_error=False)
    assert isinstance(error, redis.ResponseError), error
    assert str(error) == "Cell error: Store error: Zero rates are not supported", error
    assert pong is True or pong == "PONG", pong
    throttled([first, last], 2)

    checks = [client.execute_command("TK.CHECK", "user", key) for _ in range(6)]
    if protocol == 2:
        checks = [dict(zip(check[::2], check[1::2])) for check in checks]
    assert [bool(check["allowed"]) for check in checks] == [True] * 5 + [False], checks
    assert [check["binding"] for check in checks] == ["per-user"] * 6, checks
    assert 0 < float(checks[5]["retry_after"]) <= 120, checks
    assert checks[5]["charge"] is None and checks[0]["charge"], checks
    if protocol == 3:
        assert checks[0]["allowed"] is True and checks[0]["limits"][0]["key"] == [key], checks

    try:
        client.execute_command("TK.CHECK", "COST", "0", "user", key)
        raise AssertionError("a cost of 0")
    except redis.ResponseError as error:
        assert str(error).startswith("invalid_cost "), error
    client.close()


def pools():
    pool = redis.BlockingConnectionPool(port=PORT, max_connections=8, timeout=60)
    allowed = []

    def worker():
        client = redis.Redis(connection_pool=pool)
        for _ in range(25):
            allowed.append(client.execute_command("THROTTLE", "pool", 100, 1, 6000)[0])

    threads = [threading.Thread(target=worker) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(allowed) == 400 and sum(allowed) == 100, sum(allowed)
    pool.disconnect()


async def tasks():
    async with redis.asyncio.Redis(port=PORT, protocol=3, max_connections=50) as client:
        calls = [client.execute_command("CL.THROTTLE", "tasks", 19, 1, 6000) for _ in range(50)]
        replies = await asyncio.gather(*calls)
        assert sum(reply[0] == 0 for reply in replies) == 20, replies
        pipeline = client.pipeline(transaction=False)
        for _ in range(30):
            pipeline.execute_command("CL.THROTTLE", "tasks2", 9, 1, 6000)
        throttled(await pipeline.execute(), 10)


version(2)
version(3)
pools()
asyncio.run(tasks())
print("ok")
