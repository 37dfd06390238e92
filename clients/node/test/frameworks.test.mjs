// The middlewares in real frameworks, with the engine in this process.

import assert from "node:assert/strict";
import { Agent } from "node:http";
import { connect } from "node:net";
import { describe, test } from "node:test";
import { Limiter } from "tollkeeper";
import { APPS, DIALECTS, POLICY } from "./apps.mjs";
import { firstChunk, statusOf, until } from "./helper.mjs";

for (const [name, start] of Object.entries(APPS)) {
  describe(name, () => {
    const app = async (policy = POLICY, options = {}) => {
      const limiter = new Limiter(policy).on("error", () => {});
      let handled = 0;
      const url = await start(limiter, options, () => (handled += 1));
      return { url, limiter, handled: () => handled };
    };

    test("five requests pass and the sixth is refused", async () => {
      for (const [dialect, names] of Object.entries(DIALECTS)) {
        const { url, handled } = await app({ ...POLICY, headers: [dialect] });
        for (let request = 1; request <= 5; request++) {
          const answer = await fetch(url);
          assert.equal(await answer.text(), `hello ${request}`);
          for (const name of names) assert.ok(answer.headers.has(name), `${dialect}: ${name}`);
          assert.ok(!answer.headers.has("retry-after"));
        }
        const refused = await fetch(url);
        assert.deepEqual([refused.status, handled()], [429, 5]);
        for (const name of [...names, "retry-after"]) assert.ok(refused.headers.has(name), `${dialect}: ${name}`);
        assert.match(refused.headers.get("content-type"), /^application\/problem\+json/);
        assert.equal(refused.headers.get("cache-control"), "no-store");
        const problem = await refused.json();
        assert.deepEqual([problem.status, problem["violated-policies"]], [429, ["per-ip"]]);
        assert.equal(Math.ceil(problem.retry_after), Number(refused.headers.get("retry-after")));
      }
    });

    test("of 100 connections exactly 5 are admitted", async () => {
      const { url, handled } = await app();
      const agent = new Agent({ maxSockets: Infinity });
      const statuses = await Promise.all(Array.from({ length: 100 }, () => statusOf(url, agent)));
      agent.destroy();
      assert.deepEqual([statuses.filter((status) => status === 200).length, handled()], [5, 5]);
      assert.equal(statuses.filter((status) => status === 429).length, 95);
    });

    test("only failed logins count", async () => {
      const { url } = await app();
      const login = async (email, password) => {
        const body = JSON.stringify({ email, password });
        const headers = { "content-type": "application/json" };
        const answer = await fetch(`${url}/login`, { method: "POST", body, headers });
        await answer.text();
        return answer.status;
      };
      for (let attempt = 0; attempt < 20; attempt++) assert.equal(await login("alice@example.test", "right"), 200);
      for (const name of ["alice", "Alice", " ALICE", "alice", "alice"]) {
        assert.equal(await login(`${name}@example.test`, "wrong"), 401);
      }
      assert.equal(await login("alice@example.test", "right"), 429);
      assert.equal(await login("bob@example.test", "right"), 200);
    });

    test("slot is held while a body streams", async () => {
      const { url } = await app();
      const first = await firstChunk(`${url}/stream`);
      const refused = await fetch(`${url}/stream`);
      assert.equal(refused.status, 429);
      first.destroy();
      let second;
      await until(async () => (second = await firstChunk(`${url}/stream`)) !== null);
      second.destroy();
    });

    test("callbacks of the application are applied", async () => {
      const limits = [{ name: "per-user", by: "user", rate: "5/day", algorithm: "sliding-log" }];
      const request = (subject) => subject.req?.raw ?? subject;
      const header = (subject, name) => {
        const { headers } = request(subject);
        return (headers.get ? headers.get(name) : headers[name]) ?? undefined;
      };
      const { url, handled } = await app(
        { limits },
        {
          facts: async (subject) => ({ user: header(subject, "x-user") }),
          cost: (subject) => Number(header(subject, "x-cost") ?? 1),
          skip: (subject) => header(subject, "x-skip") === "1",
        },
      );
      const status = async (headers) => (await fetch(url, { headers })).status;
      assert.equal(await status({ "x-user": "alice", "x-cost": "5" }), 200);
      assert.equal(await status({ "x-user": "alice" }), 429);
      assert.equal(await status({ "x-user": "alice", "x-skip": "1" }), 200);
      assert.equal(await status({ "x-user": "bob", "x-cost": "0" }), 400);
      assert.equal(await status({ "x-user": "bob", "x-cost": "1.5" }), 400);
      assert.equal(await status({ "x-user": "x".repeat(2000) }), 400);
      assert.equal(handled(), 2);
    });

    test("a callback that throws is a 500, never a pass", async () => {
      for (const options of [
        { facts: () => { throw new Error("no session"); } },
        { facts: async () => { throw new Error("no session"); } },
        { cost: () => { throw new Error("no cost"); } },
        { skip: () => { throw new Error("no skip"); } },
      ]) {
        const { url, handled } = await app(POLICY, options);
        assert.equal((await fetch(url)).status, 500);
        assert.equal(handled(), 0);
      }
    });

    test("a closed limiter is a 500, never a pass", async () => {
      const { url, limiter, handled } = await app();
      await limiter.close();
      assert.equal((await fetch(url)).status, 500);
      assert.equal(handled(), 0);
    });

    test("a client that leaves during facts holds nothing", async () => {
      const { promise, resolve } = withResolvers();
      let [waiting, decided] = [0, 0];
      const facts = () => ((waiting += 1), promise);
      // The cost is asked for after the facts and right before the decision.
      const cost = () => ((decided += 1), 1);
      const { url, limiter } = await app(POLICY, { facts, cost });
      const { port } = new URL(url);
      const socket = connect(Number(port), "127.0.0.1");
      socket.write("GET /stream HTTP/1.1\r\nHost: a\r\n\r\n");
      await until(() => waiting === 1);
      socket.destroy();
      await until(() => socket.closed);
      resolve({ ip: "127.0.0.1" });
      await until(() => decided === 1);
      await until(async () => (await limiter.peek({ ip: "127.0.0.1", route: "/stream" })).allowed);
    });
  });
}

function withResolvers() {
  let resolve;
  return { promise: new Promise((settle) => (resolve = settle)), resolve };
}
