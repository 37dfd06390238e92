// What the middlewares do around a decision: callbacks, bodies, delays, and responses that something else has sent.

import assert from "node:assert/strict";
import { getEventListeners } from "node:events";
import { describe, test } from "node:test";
import express from "express";
import { Limiter } from "tollkeeper";
import { tollkeeper } from "tollkeeper/express";
import { withLimits } from "tollkeeper/fetch";
import { testing } from "tollkeeper/testing";
import { APPS, isFetch } from "./apps.mjs";
import { redis, served, until } from "./helper.mjs";

const json = { "content-type": "application/json" };
const once = { name: "once", rate: "1/day", algorithm: "sliding-log" };
const byEmail = { http: { routes: ["/", "/login"], facts: { email: { from: "body.email" } } } };
const quiet = (options) => new Limiter(options).on("error", () => {});

for (const [name, start] of Object.entries(APPS)) {
  describe(name, () => {
    test("onRefused answers with the headers of the refusal", async () => {
      const onRefused = isFetch(name)
        ? async (subject, decision) => Response.json({ wait: decision.retryAfter }, { status: 503 })
        : async (request, response, decision) => {
            const body = JSON.stringify({ wait: decision.retryAfter });
            return response.raw ? response.code(503).send(body) : ((response.statusCode = 503), response.end(body));
          };
      const url = await start(quiet({ limits: [once] }), { onRefused }, () => 1);
      assert.equal((await fetch(url)).status, 200);
      const refused = await fetch(url);
      assert.equal(refused.status, 503);
      assert.match(refused.headers.get("retry-after"), /^\d+$/);
      assert.doesNotMatch(refused.headers.get("content-type") ?? "", /problem/);
      assert.ok((await refused.json()).wait > 0);
    });

    test("onError answers a request that cannot be decided", async () => {
      const onError = isFetch(name)
        ? (error) => new Response(error.message, { status: 502 })
        : (error, request, response) => {
            if (response.raw) response.code(502).send(error.message);
            else (response.statusCode = 502), response.end(error.message);
          };
      const facts = async () => {
        throw new Error("no session");
      };
      const url = await start(quiet({ limits: [once] }), { facts, onError }, () => 1);
      const answer = await fetch(url);
      assert.deepEqual([answer.status, await answer.text()], [502, "no session"]);
    });

    test("callbacks that throw are a 500 in memory and on Redis", async () => {
      const { url: store } = await redis();
      const sync = () => {
        throw new Error("a bug of the application");
      };
      for (const options of [{}, { store, redis: { deadline: "5s" } }]) {
        for (const [limit, onRefused] of Object.entries({ sync, async: async () => sync() })) {
          const url = await start(quiet({ ...options, limits: [{ ...once, name: limit }] }), { onRefused }, () => 1);
          assert.deepEqual([(await fetch(url)).status, (await fetch(url)).status], [200, 500]);
        }
        for (const onError of [sync, async () => sync()]) {
          const facts = async () => sync();
          const url = await start(quiet({ ...options, limits: [once] }), { facts, onError }, () => 1);
          assert.equal((await fetch(url)).status, 500);
        }
      }
    });

    test("facts, cost and skip run once if the body is needed", async () => {
      const calls = { facts: 0, cost: 0, skip: 0 };
      const options = {
        facts: () => ((calls.facts += 1), {}),
        cost: () => ((calls.cost += 1), 1),
        skip: () => ((calls.skip += 1), false),
      };
      const limits = [{ ...once, by: "email", when: { route: "/login" } }];
      const url = await start(quiet({ ...byEmail, limits }), options, () => 1);
      const body = JSON.stringify({ email: "alice@example.test", password: "right" });
      const post = async () => (await fetch(`${url}/login`, { method: "POST", body, headers: json })).status;
      assert.deepEqual([await post(), calls], [200, { facts: 1, cost: 1, skip: 1 }]);
      assert.equal(await post(), 429);
    });

    test("a request without a body is decided", async () => {
      const limits = [{ ...once, by: "email" }, { ...once, name: "per-ip", by: "ip" }];
      const url = await start(quiet({ ...byEmail, limits }), {}, () => 1);
      assert.deepEqual([(await fetch(url)).status, (await fetch(url)).status], [200, 429]);
    });

    test("a delayed request waits for its departure", async () => {
      const limits = [{ name: "shaped", rate: "10/s", algorithm: "leaky-bucket", burst: 3 }];
      const handled = [];
      const url = await start(quiet({ limits }), {}, () => handled.push(performance.now()));
      const answers = await Promise.all([1, 2, 3].map(() => fetch(url)));
      assert.deepEqual(answers.map((answer) => answer.status), [200, 200, 200]);
      // They depart 100 ms apart, whenever they arrived. A timer may fire a millisecond early.
      assert.ok(handled[2] - handled[0] > 150, String(handled));
    });
  });
}

/** An Express application with `tollkeeper()` after `before`. */
async function app(limiter, before, options = {}) {
  const app = express();
  for (const middleware of before) app.use(middleware);
  app.use(tollkeeper(limiter, options));
  app.use((request, response) => response.end());
  app.use((error, request, response, next) => response.status(500).end(error.message));
  return served(app);
}

test("a body that no limit needs is not converted", async () => {
  const unreadable = (request, response, next) => {
    request.body = {
      get email() {
        throw new Error("the body was converted");
      },
    };
    next();
  };
  const limits = [{ ...once, by: "email", when: { route: "/login" } }];
  const url = await app(quiet({ ...byEmail, limits }), [unreadable]);
  assert.equal((await fetch(url)).status, 200);
  assert.equal((await fetch(`${url}/login`)).status, 500);
});

test("bodies that Express leaves undefined are no 500", async () => {
  const limits = [{ ...once, by: "email" }];
  const url = await app(quiet({ ...byEmail, limits }), [express.json()]);
  const post = async (body, headers = json) => (await fetch(url, { method: "POST", body, headers })).status;
  assert.equal(await post(""), 200);
  assert.equal(await post("email=alice", { "content-type": "text/plain" }), 415);
  assert.equal(await post(JSON.stringify({ email: "alice", padding: "x".repeat(70_000) })), 413);
  assert.deepEqual([await post('{"email":"alice"}'), await post('{"email":"alice"}')], [200, 429]);
});

test("raw bodies are read as the client sent them", async () => {
  const limits = [{ ...once, by: "email" }];
  for (const parser of [express.raw({ type: "*/*" }), express.text({ type: "*/*" })]) {
    const url = await app(quiet({ ...byEmail, limits }), [parser]);
    const post = async (body) => (await fetch(url, { method: "POST", body, headers: json })).status;
    assert.deepEqual([await post('{"email":"é"}'), await post('{"email":"\\u00e9"}')], [200, 429]);
    assert.equal(await post(`{"email":"bob","padding":"${"x".repeat(70_000)}"}`), 413);
  }
});

test("a mounted router is limited by the whole path", async () => {
  const limits = [{ ...once, when: { route: "/api/login" } }];
  const router = express.Router();
  router.use(tollkeeper(quiet({ http: { routes: ["/api/login"] }, limits })));
  router.get("/login", (request, response) => response.end());
  const main = express();
  main.use("/api", router);
  const url = await served(main);
  assert.deepEqual([(await fetch(`${url}/api/login`)).status, (await fetch(`${url}/api/login`)).status], [200, 429]);
});

test("a response that is already sent holds no slot", async () => {
  const limiter = quiet({ limits: [{ name: "streams", by: "ip", algorithm: "concurrency", limit: 1 }] });
  let decided = 0;
  const facts = async (request) => {
    request.res.end("early");
    return {};
  };
  const cost = () => ((decided += 1), 1);
  const url = await app(limiter, [], { facts, cost });
  for (let request = 1; request <= 3; request++) {
    assert.equal(await (await fetch(url)).text(), "early");
    await until(() => decided === request);
    await until(async () => (await limiter.peek({ ip: "127.0.0.1" })).allowed);
  }
});

test("a delay leaves no listener on the signal of a request", async () => {
  const { limiter } = testing({ limits: [{ name: "shaped", rate: "100/s", algorithm: "leaky-bucket", burst: 3 }] });
  const limited = withLimits(limiter, () => new Response("hello"));
  const { signal } = new AbortController();
  for (let count = 0; count < 3; count++) {
    const request = new Request("http://a.test/", { signal });
    assert.equal((await limited(request)).status, 200);
    assert.equal(getEventListeners(request.signal, "abort").length, 0);
  }
});

test("limits of a decision have the names of JavaScript", async () => {
  const { limiter } = testing({ limits: [{ name: "per-user", by: "user", rate: "1/min", burst: 1 }] });
  await limiter.check({ user: "alice" });
  const [limit] = (await limiter.check({ user: "alice" })).limits;
  assert.deepEqual([limit.retryAfter, limit.resetAfter, limit.remaining, limit.degraded], [60, 60, 0, null]);
  assert.ok(!("retry_after" in limit) && !("reset_after" in limit));
});
