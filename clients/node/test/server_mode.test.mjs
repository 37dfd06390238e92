// `new Limiter({ server })` against a real server, over HTTP and over RESP.

import assert from "node:assert/strict";
import { once } from "node:events";
import { createHash } from "node:crypto";
import { test } from "node:test";
import { Limiter, TollkeeperError } from "tollkeeper";
import { PATIENCE_MS, freePort, served, server, silence, thrown, until } from "./helper.mjs";

const POLICY = `
limits:
  - { name: per-user, by: user, rate: 3/day, algorithm: sliding-log }
  - { name: tokens, by: api_key, rate: 1000/day, algorithm: fixed-window, cost: tokens, cost_missing: error }
  - { name: exports, by: tenant, algorithm: concurrency, limit: 1 }
`;
// A busy machine may need longer than 200 ms.
const timeout = PATIENCE_MS;

test("both transports decide, and share their counts", async () => {
  const { http, resp } = await server(POLICY);
  const [overHttp, overResp] = [http, resp].map((server) => new Limiter({ server, timeout }));
  const first = await overHttp.check({ user: "alice" });
  assert.deepEqual(
    [first.allowed, first.binding, first.limit, first.remaining, first.resetAfter, first.degraded],
    [true, "per-user", 3, 2, 86400, null],
  );
  const second = await overResp.check({ user: "alice" });
  assert.deepEqual([second.allowed, second.remaining, second.limits[0].key], [true, 1, ["alice"]]);
  assert.equal((await overResp.peek({ user: "alice" })).remaining, 1);
  await overHttp.check({ user: "alice" });
  for (const limiter of [overHttp, overResp]) {
    const refused = await limiter.check({ user: "alice" });
    assert.deepEqual([refused.allowed, refused.remaining, refused.charge], [false, 0, null]);
    assert.ok(refused.retryAfter > 86000);
    assert.match(refused.reason, /`per-user` allows 3 per day/);
    assert.match(refused.headers()["retry-after"], /^\d+$/);
  }
  assert.equal((await overHttp.check({ user: "bob" })).headers()["x-ratelimit-remaining"], "2");
  assert.equal((await overHttp.check({ user: "bob" }, { cost: 9 })).never, true);
  await overResp.close();
});

test("every call of the HTTP API has a method", async () => {
  const { http } = await server(POLICY + `admin: { token_sha256: ${sha256("secret")} }\n`);
  const limiter = new Limiter({ server: http, token: "secret", timeout });
  const { charge } = await limiter.check({ user: "alice" }, { cost: 2 });
  assert.equal(await limiter.refund(charge, { cost: 1 }), true);
  assert.equal(await limiter.refund(charge), false);
  assert.equal((await limiter.usage({ user: "alice" }))[0].remaining, 2);
  assert.match((await limiter.explain({ user: "alice" })).find((limit) => limit.applies).why, /3 per day/);
  assert.equal(await limiter.forget("per-user", { user: "alice" }), true);
  assert.equal(await limiter.forget("per-user", { user: "alice" }), false);

  const reserved = await limiter.reserve({ api_key: "k1", tokens: 400 }, { ttl: "60s" });
  assert.equal(reserved.remaining, 600);
  assert.equal(await limiter.settle(reserved.charge, { facts: { tokens: 150 } }), true);
  assert.equal((await limiter.usage({ api_key: "k1" }))[0].remaining, 850);

  const { decision, slot } = await limiter.acquire({ tenant: "acme" });
  assert.equal(decision.allowed, true);
  assert.equal((await limiter.acquire({ tenant: "acme" })).decision.allowed, false);
  assert.equal(await slot.renew(), true);
  assert.equal(await slot.release(), true);
  assert.equal(await slot.release(), false);
  assert.equal((await limiter.acquire({ user: "no concurrency limit applies" })).slot, null);
  assert.throws(() => limiter.policy, /the policy is on the server/);
  assert.throws(() => limiter.checkSync({}), TypeError);
  await limiter.close();
  await limiter.close();
  assert.equal((await thrown(() => limiter.check({}))).code, "closed");
});

test("RESP has no other calls, and says so", async () => {
  const { resp } = await server(POLICY);
  const limiter = new Limiter({ server: resp, timeout });
  for (const call of ["usage", "explain", "acquire"]) {
    assert.match((await thrown(() => limiter[call]({}))).message, /use server: "http/);
  }
});

test("a wrong token or URL is an error, never a pass", async () => {
  const { http, resp } = await server(POLICY + `auth: { token_sha256: [${sha256("data")}] }\n`);
  for (const [options, code] of [
    [{ server: http }, "unauthorized"],
    [{ server: http, token: "wrong" }, "unauthorized"],
    [{ server: resp }, "unauthorized"],
    [{ server: resp, token: "wrong" }, "unauthorized"],
    [{ server: `${http}/nowhere`, token: "data" }, "not_found"],
  ]) {
    const error = await thrown(() => new Limiter({ ...options, timeout }).check({ user: "alice" }));
    assert.deepEqual([error.constructor, error.code], [TollkeeperError, code]);
  }
  for (const options of [
    { server: http, token: "data" },
    { server: resp, token: "data" },
    { server: resp.replace("//", "//:data@") },
  ]) {
    assert.equal((await new Limiter({ ...options, timeout }).check({ user: "alice" })).degraded, null);
  }
});

test("an answer that cannot be read is an error", async () => {
  for (const [status, body] of [[200, "<html>"], [200, "{}"], [200, "null"], [429, ""], [302, ""], [418, "{}"]]) {
    const url = await served((request, response) => response.writeHead(status).end(body));
    const error = await thrown(() => new Limiter({ server: url, timeout }).check({}));
    assert.equal(error.code, "unexpected_answer", `${status} ${body}`);
  }
});

test("an unavailable server is decided by onUnavailable", async () => {
  const { port } = await silence();
  const unused = await freePort();
  const broken = await served((request, response) => response.writeHead(502).end());
  for (const [server, timeout, why] of [
    [`http://127.0.0.1:${port}`, 20, /did not answer within 20 ms/],
    [`redis://127.0.0.1:${port}`, 20, /did not answer within 20 ms/],
    [`http://127.0.0.1:${unused}`, PATIENCE_MS, /did not answer: .*ECONNREFUSED/],
    [`redis://127.0.0.1:${unused}`, PATIENCE_MS, /did not answer: .*ECONNREFUSED/],
    [broken, PATIENCE_MS, /answered 502/],
  ]) {
    const errors = [];
    const open = new Limiter({ server, timeout }).on("error", (error) => errors.push(error.message));
    const admitted = await open.check({});
    const { allowed, degraded, binding, limits } = admitted;
    assert.deepEqual([allowed, degraded, binding, limits], [true, "allow", null, []]);
    assert.match(errors.join("; "), why);
    const closed = new Limiter({ server, timeout, onUnavailable: "deny" }).on("error", () => {});
    const refused = await closed.check({});
    assert.deepEqual([refused.allowed, refused.degraded, refused.retryAfter], [false, "deny", 1]);
    if (server.startsWith("http")) assert.equal((await thrown(() => closed.refund("charge"))).code, "unavailable");
  }
});

test("problems are reported once a second", () => {
  const errors = [];
  const limiter = new Limiter({ server: "http://127.0.0.1:8080" }).on("error", (error) => errors.push(error.message));
  for (const message of ["first", "second"]) limiter.reportError(new Error(message));
  assert.deepEqual(errors, ["first"]);
});

test("after five failures the server is not asked for a second", async () => {
  let asked = 0;
  let up = false;
  const url = await served((request, response) => {
    asked += 1;
    const none = { binding: null, retry_after: null, degraded: null, charge: null };
    const answer = { allowed: true, ...none, delay: 0, limits: [] };
    response.writeHead(up ? 200 : 500).end(JSON.stringify(answer));
  });
  const limiter = new Limiter({ server: url, timeout }).on("error", () => {});
  for (let request = 0; request < 50; request++) assert.equal((await limiter.check({})).degraded, "allow");
  assert.equal(asked, 5);
  up = true;
  await until(async () => (await limiter.check({})).degraded === null);
  assert.equal(asked, 6);
});

test("a signal cancels a call, and is no failure of the server", async () => {
  const { port, sockets } = await silence();
  for (const scheme of ["http", "redis"]) {
    const errors = [];
    const limiter = new Limiter({ server: `${scheme}://127.0.0.1:${port}`, timeout });
    limiter.on("error", (error) => errors.push(error));
    const reason = new Error("the caller left");
    assert.equal(await thrown(() => limiter.check({}, { signal: AbortSignal.abort(reason) })), reason);
    const controller = new AbortController();
    const seen = sockets.size;
    const check = thrown(() => limiter.check({}, { signal: controller.signal }));
    await until(() => sockets.size > seen);
    controller.abort(reason);
    assert.equal(await check, reason);
    assert.deepEqual(errors, []);
    await limiter.close();
  }
});

test("the caller's own timeout keeps the RESP connection", async () => {
  const { port, sockets } = await silence();
  const limiter = new Limiter({ server: `redis://127.0.0.1:${port}`, timeout });
  const late = () => AbortSignal.timeout(1);
  for (let call = 0; call < 2; call++) {
    assert.equal((await thrown(() => limiter.check({}, { signal: late() }))).name, "TimeoutError");
    await until(() => sockets.size > 0);
  }
  assert.equal(sockets.size, 1);
  await limiter.close();
});

test("the scheme of a server is read in any case", async () => {
  const { http } = await server(POLICY);
  const limiter = new Limiter({ server: http.replace("http", "HTTP"), timeout });
  const visit = await limiter.visit(
    { method: "GET", url: "/", headers: {}, rawHeaders: [] },
    { facts: () => ({ tenant: "acme" }) },
  );
  assert.deepEqual([visit.allowed, visit.isOpen], [true, true]);
  visit.gone();
});

test("leaving the scope of a slot reports a lost server", async () => {
  const { http, child } = await server(POLICY);
  const errors = [];
  const limiter = new Limiter({ server: http, timeout }).on("error", (error) => errors.push(error.code));
  const { slot } = await limiter.acquire({ tenant: "acme" });
  child.kill("SIGKILL");
  await once(child, "exit");
  await slot[Symbol.asyncDispose ?? Symbol.for("nodejs.asyncDispose")]();
  assert.deepEqual(errors, ["unavailable"]);
  assert.equal((await thrown(() => slot.release())).code, "unavailable");
});

test("server mode never loads the addon", async () => {
  const { http } = await server(POLICY);
  await new Limiter({ server: http, timeout }).check({ user: "alice" });
  const loaded = process.report.getReport().sharedObjects.filter((file) => file.endsWith(".node"));
  assert.deepEqual(loaded, []);
});

test("wrong options are refused at once", () => {
  for (const [options, message] of [
    [{}, /exactly one of/],
    [{ server: "http://a", config: "b" }, /exactly one of/],
    [{ server: "127.0.0.1:8080" }, /must begin with http:|is not a URL/],
    [{ server: "ftp://a" }, /must begin with http:/],
    [{ server: "http://a", timeout: "1s" }, /number of milliseconds/],
    [{ server: "http://a", timeout: 2 ** 31 }, /number of milliseconds/],
    [{ server: "http://a", onUnavailable: "open" }, /"allow" or "deny"/],
    [{ server: "http://a", retries: 3 }, /unknown option `retries`/],
  ]) {
    assert.throws(() => new Limiter(options), message);
  }
  assert.throws(() => new Limiter({ server: "http://a" }).on("refused", () => {}), /there is no event refused/);
});

function sha256(text) {
  return createHash("sha256").update(text).digest("hex");
}
