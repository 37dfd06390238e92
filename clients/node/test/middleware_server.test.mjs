// The middlewares with a limiter of a real server.

import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { Limiter } from "tollkeeper";
import { APPS } from "./apps.mjs";
import { PATIENCE_MS, freePort, server, until } from "./helper.mjs";

const POLICY = `
headers: [ietf]
limits:
  - { name: per-ip, by: [ip, method], unless: { kind: stream }, rate: 3/day, algorithm: sliding-log }
  - { name: streams, when: { kind: stream }, by: ip, algorithm: concurrency, limit: 1 }
`;

for (const [name, start] of Object.entries(APPS)) {
  describe(name, () => {
    const app = async (options) => {
      let handled = 0;
      const limiter = new Limiter({ timeout: PATIENCE_MS, ...options }).on("error", () => {});
      const facts = (subject) => ({ kind: /stream/.test((subject.req ?? subject).url) ? "stream" : undefined });
      return { url: await start(limiter, { facts }, () => (handled += 1)), handled: () => handled };
    };

    test("a server decides by address and method", async () => {
      const { http, resp } = await server(POLICY);
      const { url, handled } = await app({ server: http });
      for (let request = 0; request < 3; request++) {
        const answer = await fetch(url);
        assert.equal(answer.status, 200);
        assert.match(answer.headers.get("ratelimit"), /^"per-ip";r=[210]/);
      }
      const refused = await fetch(url);
      assert.equal(refused.status, 429);
      assert.match(refused.headers.get("retry-after"), /^\d+$/);
      assert.match(refused.headers.get("content-type"), /^application\/problem\+json/);
      assert.ok((await refused.json()).retry_after > 86000);
      const overResp = await app({ server: resp });
      assert.equal((await fetch(overResp.url)).status, 429);
      assert.deepEqual([handled(), overResp.handled()], [3, 0]);
    });

    test("slot of a server is held while a body streams", async () => {
      const { http } = await server(POLICY);
      const { url } = await app({ server: http });
      const client = new AbortController();
      const first = await fetch(`${url}/stream`, { signal: client.signal });
      assert.equal(first.status, 200);
      assert.equal((await fetch(`${url}/stream`)).status, 429);
      client.abort();
      const second = new AbortController();
      await until(async () => (await fetch(`${url}/stream`, { signal: second.signal })).status === 200);
      second.abort();
    });

    test("an unavailable server follows onUnavailable", async () => {
      const gone = `http://127.0.0.1:${await freePort()}`;
      assert.equal((await fetch((await app({ server: gone })).url)).status, 200);
      const { url, handled } = await app({ server: gone, onUnavailable: "deny" });
      const refused = await fetch(url);
      assert.deepEqual([refused.status, refused.headers.get("retry-after"), handled()], [503, "1", 0]);
    });

    test("facts that cannot be read are a 400, never a pass", async () => {
      const { http } = await server(POLICY);
      let handled = 0;
      const limiter = new Limiter({ server: http, timeout: PATIENCE_MS });
      const url = await start(limiter, { facts: () => new Map([["user", "alice"]]) }, () => (handled += 1));
      assert.deepEqual([(await fetch(url)).status, handled], [400, 0]);
    });

    test("a wrong URL is a 500, never a pass", async () => {
      const { http } = await server(POLICY);
      const { url, handled } = await app({ server: `${http}/nowhere` });
      assert.equal((await fetch(url)).status, 500);
      assert.equal(handled(), 0);
    });
  });
}
