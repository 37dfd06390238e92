// Unmodified ioredis against a server whose policy has one limit: 5 in 10 minutes for each `user`.
import assert from "node:assert/strict";
import Redis from "ioredis";

const redis = new Redis({ port: Number(process.argv[2]), connectionName: "node" });

assert.equal(await redis.ping(), "PONG");
assert.equal(await redis.client("GETNAME"), "node");

// 100 calls in one iteration of the event loop; replies arrive in order.
const calls = Array.from({ length: 100 }, () => redis.call("CL.THROTTLE", "node", 59, 1, 6000));
const replies = await Promise.all(calls);
replies.forEach(([limited, limit, remaining, retry], index) => {
  assert.deepEqual([limited, limit, remaining], [index < 60 ? 0 : 1, 60, Math.max(0, 59 - index)]);
  assert.equal(retry === -1, index < 60);
});

const pipeline = redis.pipeline();
for (let index = 0; index < 50; index++) pipeline.call("THROTTLE", "node", 20, 1, 6000);
const results = await pipeline.exec();
assert.deepEqual(results.map(([error, [allowed]]) => [error, allowed]),
  results.map((_, index) => [null, index < 20 ? 1 : 0]));

assert.equal(await redis.del("node"), 1);
assert.equal((await redis.call("CL.THROTTLE", "node", 59, 1, 6000))[2], 59);

const check = await redis.call("TK.CHECK", "user", "node");
assert.deepEqual(check.slice(0, 4), ["allowed", 1, "binding", "per-user"]);

await assert.rejects(redis.call("CL.THROTTLE", "node"), /Usage: cl\.throttle <key>/);
await assert.rejects(redis.call("THROTTLE", "node", 1, 1, 1, -1), /negative quantity: -1/);

// Connections of a pool share one count.
const pool = Array.from({ length: 10 }, () => redis.duplicate());
const counts = await Promise.all(pool.flatMap((one) =>
  Array.from({ length: 20 }, () => one.call("CL.THROTTLE", "pool", 49, 1, 6000))));
assert.equal(counts.filter(([limited]) => limited === 0).length, 50);

await Promise.all([redis, ...pool].map((one) => one.quit()));
console.log("ok");
