// The engine on a real Redis: exact across processes, and never blocking the event loop.

import assert from "node:assert/strict";
import { once } from "node:events";
import { test } from "node:test";
import { Worker } from "node:worker_threads";
import { Limiter } from "tollkeeper";
import { PATIENCE_MS, line, redis, server, start, until } from "./helper.mjs";

const policy = (failure) => ({
  redis: { deadline: "5s" },
  on_store_failure: failure,
  limits: [
    { name: "per-user", by: "user", rate: "100/day", algorithm: "sliding-log" },
    { name: "all", rate: "1000/day", algorithm: "fixed-window" },
  ],
});

test("processes and the server together admit the limit", async () => {
  const { url } = await redis();
  const { http } = await server(JSON.stringify({ ...policy("deny"), store: url }));
  const code = `
    import { Limiter } from "tollkeeper";
    const limiter = new Limiter(${JSON.stringify({ ...policy("deny"), store: url })});
    const decisions = await Promise.all(Array.from({ length: 60 }, () => limiter.check({ user: "alice" })));
    const degraded = decisions.filter((decision) => decision.degraded).length;
    console.log("admitted " + decisions.filter((decision) => decision.allowed).length + " " + degraded);
  `;
  const nodes = [1, 2].map(() => line(start(process.execPath, ["--input-type=module", "-e", code]), "admitted "));
  const remote = new Limiter({ server: http, timeout: PATIENCE_MS });
  const asked = await Promise.all(Array.from({ length: 60 }, () => remote.check({ user: "alice" })));
  const [first, second] = (await Promise.all(nodes)).map((text) => text.split(" ").map(Number));
  assert.deepEqual([first[1], second[1]], [0, 0], "no decision was made without Redis");
  assert.equal(first[0] + second[0] + asked.filter((decision) => decision.allowed).length, 100);
});

test("a stopped Redis is decided by policy, loop unblocked", async () => {
  const { url, child } = await redis();
  for (const [failure, allowed] of [["allow", true], ["deny", false], ["local", true]]) {
    const limiter = new Limiter({ ...policy(failure), redis: { deadline: "50ms" }, store: url });
    await until(async () => (await limiter.check({ user: failure })).degraded === null);
    child.kill("SIGSTOP");
    let turns = 0;
    let isDecided = false;
    const check = limiter.check({ user: failure }).finally(() => (isDecided = true));
    // If the call blocked this thread, the answer would be there before the first turn.
    while (!isDecided) {
      await new Promise((resolve) => setImmediate(resolve));
      turns += 1;
    }
    const decision = await check;
    assert.deepEqual([decision.allowed, decision.degraded, turns > 2], [allowed, failure, true]);
    child.kill("SIGCONT");
    await until(async () => (await limiter.peek({ user: failure })).degraded === null);
    await limiter.close();
  }
});

test("a killed Redis is used again once it is back", async () => {
  const first = await redis();
  const limiter = new Limiter({ ...policy("allow"), store: first.url });
  assert.equal((await limiter.check({ user: "alice" })).remaining, 99);
  first.child.kill("SIGKILL");
  await until(async () => (await limiter.check({ user: "alice" })).degraded === "allow");
  await redis(first.port);
  await until(async () => (await limiter.check({ user: "bob" })).degraded === null);
  await limiter.close();
});

test("other calls wait for Redis as well", async () => {
  const { url } = await redis();
  const limits = [
    { name: "tokens", by: "user", rate: "1000/day", algorithm: "fixed-window", cost: "tokens" },
    { name: "exports", by: "tenant", algorithm: "concurrency", limit: 1 },
  ];
  const limiter = new Limiter({ redis: { deadline: "5s" }, limits, store: url });
  assert.throws(() => limiter.checkSync({ user: "alice" }), /memory:\/\//);
  const reserved = await limiter.reserve({ user: "alice", tokens: 400 }, { ttl: "60s" });
  assert.equal(reserved.headers()["x-ratelimit-remaining"], "600");
  assert.equal(await limiter.settle(reserved.charge, { facts: { tokens: 100 } }), true);
  assert.equal((await limiter.usage({ user: "alice", tokens: 1 }))[0].remaining, 900);
  const { slot } = await limiter.acquire({ tenant: "acme" });
  assert.equal((await limiter.acquire({ tenant: "acme" })).decision.allowed, false);
  assert.deepEqual([await slot.renew(), await slot.release(), await slot.release()], [true, true, false]);
  assert.equal(await limiter.forget("tokens", { user: "alice" }), true);
  assert.equal(limiter.policy.limits.length, 2);
  await limiter.close();
});

test("each worker thread gets its own answers", async () => {
  const { url } = await redis();
  const code = `
    const { parentPort, workerData } = require("node:worker_threads");
    const { Limiter } = require("tollkeeper");
    const limiter = new Limiter(workerData);
    const users = Array.from({ length: 20 }, (_, user) => user);
    Promise.all(users.map((user) => limiter.check({ user }))).then((decisions) => {
      parentPort.postMessage(decisions.map((decision) => decision.limits[0].key[0]).join(" "));
    });
  `;
  const workerData = { ...policy("deny"), store: url, name: "workers" };
  const answers = [1, 2, 3].map(() => {
    const worker = new Worker(code, { eval: true, workerData });
    return new Promise((resolve, reject) => worker.on("message", resolve).on("error", reject));
  });
  const expected = Array.from({ length: 20 }, (_, user) => user).join(" ");
  assert.deepEqual(await Promise.all(answers), [expected, expected, expected]);
});

test("calls of a worker thread that ends are completed", async () => {
  const { url } = await redis();
  const limiter = new Limiter({ ...policy("deny"), store: url });
  const code = `
    const { workerData } = require("node:worker_threads");
    const { Limiter } = require("tollkeeper");
    const limiter = new Limiter(workerData);
    for (let call = 0; call < 10; call++) limiter.check({ user: "alice" });
    process.exit();
  `;
  await once(new Worker(code, { eval: true, workerData: { ...policy("deny"), store: url } }), "exit");
  await until(async () => (await limiter.usage({ user: "alice" }))[0].remaining === 90);
  await limiter.close();
});

test("calls that are made together are decided in their order", async () => {
  const { url } = await redis();
  const limiter = new Limiter({ ...policy("deny"), store: url });
  await limiter.check({ user: "alice" });
  const decisions = await Promise.all(Array.from({ length: 99 }, () => limiter.check({ user: "alice" })));
  assert.deepEqual(decisions.map((decision) => decision.remaining), Array.from({ length: 99 }, (_, at) => 98 - at));
  await limiter.close();
});

test("a call that is made before close() is answered", async () => {
  const { url } = await redis();
  const limiter = new Limiter({ ...policy("deny"), store: url });
  const check = limiter.check({ user: "alice" });
  await limiter.close();
  assert.deepEqual([(await check).allowed, (await check).degraded], [true, null]);
});
