// The store in real express-rate-limit and hono-rate-limiter.

import assert from "node:assert/strict";
import { describe, test } from "node:test";
import express from "express";
import { rateLimit } from "express-rate-limit";
import { Hono } from "hono";
import { rateLimiter } from "hono-rate-limiter";
import { TollkeeperStore } from "tollkeeper/express-rate-limit";
import { redis, served, thrown } from "./helper.mjs";

const windowMs = 86_400_000;
// A busy machine may need longer than the 10 ms of the default.
const patient = { redis: { deadline: "5s" } };

async function app(options, status = () => 200) {
  const app = express();
  const headers = { standardHeaders: "draft-8", legacyHeaders: false };
  app.use(rateLimit({ windowMs, limit: 3, ...headers, validate: false, ...options }));
  app.get("/", (request, response) => response.status(status(request)).end());
  app.use((error, request, response, next) => response.status(500).end(error.message));
  const url = await served(app);
  return (headers) => fetch(url, { headers });
}

for (const [name, store] of [["memory", async () => "memory://"], ["Redis", async () => (await redis()).url]]) {
  describe(name, () => {
    test("requests above the limit are refused", async () => {
      const counts = new TollkeeperStore({ ...patient, store: await store(), algorithm: "sliding-log" });
      const get = await app({ store: counts });
      for (const remaining of [2, 1, 0]) {
        const answer = await get();
        assert.equal(answer.status, 200);
        assert.match(answer.headers.get("ratelimit"), new RegExp(`r=${remaining}; t=86400`));
      }
      const refused = await get();
      assert.deepEqual([refused.status, refused.headers.get("retry-after")], [429, "86400"]);
    });

    test("increment, get, decrement and resetKey work", async () => {
      const counts = new TollkeeperStore({ ...patient, store: await store(), algorithm: "fixed-window" });
      counts.init({ windowMs, limit: 3 });
      assert.equal(counts.localKeys, name === "memory");
      assert.equal(await counts.get("alice"), undefined);
      const hits = async () => (await counts.increment("alice")).totalHits;
      assert.deepEqual([await hits(), await hits()], [1, 2]);
      assert.equal((await counts.get("alice")).totalHits, 2);
      await counts.decrement("alice");
      assert.deepEqual([await hits(), await hits(), await hits(), await hits()], [2, 3, 4, 4]);
      assert.equal((await counts.increment("bob")).totalHits, 1);
      const { resetTime } = await counts.increment("alice");
      assert.ok(resetTime > new Date() && resetTime <= new Date(Date.now() + windowMs));
      await counts.resetKey("alice");
      assert.equal(await hits(), 1);
      await counts.decrement("nobody");
      assert.equal((await counts.increment("")).totalHits, 1);
      assert.equal((await counts.increment("")).totalHits, 2);
      await counts.shutdown();
    });

    test("skipFailedRequests gives the charge back", async () => {
      const get = await app(
        { store: new TollkeeperStore({ ...patient, store: await store() }), skipFailedRequests: true, limit: 2 },
        (request) => Number(request.headers["x-status"]),
      );
      for (let request = 0; request < 6; request++) assert.equal((await get({ "x-status": "500" })).status, 500);
      for (let request = 0; request < 2; request++) assert.equal((await get({ "x-status": "200" })).status, 200);
      assert.equal((await get({ "x-status": "200" })).status, 429);
    });
  });
}

test("stores with one prefix share their counts", async () => {
  const { url } = await redis();
  const [one, same, other] = ["a", "a", "b"].map((prefix) => new TollkeeperStore({ ...patient, store: url, prefix }));
  for (const store of [one, same, other]) store.init({ windowMs, limit: 3 });
  const hits = [];
  for (const store of [one, same, other]) hits.push((await store.increment("alice")).totalHits);
  assert.deepEqual(hits, [1, 2, 1]);
});

test("hono-rate-limiter takes the same store", async () => {
  const app = new Hono();
  app.use(rateLimiter({ windowMs, limit: 2, keyGenerator: () => "alice", store: new TollkeeperStore() }));
  app.get("/", (context) => context.text("hello"));
  const statuses = [];
  for (let request = 0; request < 3; request++) statuses.push((await app.request("/")).status);
  assert.deepEqual(statuses, [200, 200, 429]);
});

test("a limit that is a function is a 500, never a pass", async () => {
  const get = await app({ store: new TollkeeperStore(), limit: () => 3 });
  const answer = await get();
  assert.equal(answer.status, 500);
  assert.match(await answer.text(), /needs a number as `limit`/);
  const store = new TollkeeperStore();
  assert.throws(() => store.init({ windowMs, limit: async () => 3 }), /needs a number/);
  assert.match((await thrown(() => store.increment("alice"))).message, /needs a number/);
  assert.match((await thrown(() => new TollkeeperStore().increment("alice"))).message, /has not called init/);
  assert.throws(() => new TollkeeperStore({ client: {} }), /unknown option `client`/);
});

test("a limit of 0 refuses everything", async () => {
  const get = await app({ store: new TollkeeperStore(), limit: 0 });
  assert.equal((await get()).status, 429);
});
