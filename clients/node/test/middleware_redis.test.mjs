// The middlewares with the engine on a real Redis, where every decision is awaited.

import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { Limiter } from "tollkeeper";
import { APPS, POLICY } from "./apps.mjs";
import { firstChunk, redis, until } from "./helper.mjs";

for (const [name, start] of Object.entries(APPS)) {
  describe(name, () => {
    const app = async () => {
      const { url: store } = await redis();
      const limiter = new Limiter({ ...POLICY, store, redis: { deadline: "5s" } });
      return start(limiter, {}, () => 1);
    };

    test("the sixth request is refused", async () => {
      const url = await app();
      const answers = [];
      for (let request = 0; request < 6; request++) answers.push(await fetch(url));
      assert.deepEqual(answers.map((answer) => answer.status), [200, 200, 200, 200, 200, 429]);
      assert.match(answers[5].headers.get("retry-after"), /^\d+$/);
    });

    test("a successful login is given back", async () => {
      const url = await app();
      const login = async (password) => {
        const body = JSON.stringify({ email: "alice@example.test", password });
        const headers = { "content-type": "application/json" };
        return (await fetch(`${url}/login`, { method: "POST", body, headers })).status;
      };
      for (let attempt = 0; attempt < 4; attempt++) assert.equal(await login("wrong"), 401);
      // One is left. It is given back after each response, in the background.
      for (let attempt = 0; attempt < 3; attempt++) await until(async () => (await login("right")) === 200);
      await until(async () => (await login("wrong")) === 401);
      assert.equal(await login("right"), 429);
    });

    test("a slot is held until the client leaves", async () => {
      const url = await app();
      const first = await firstChunk(`${url}/stream`);
      assert.equal((await fetch(`${url}/stream`)).status, 429);
      first.destroy();
      let second;
      await until(async () => (second = await firstChunk(`${url}/stream`)) !== null);
      second.destroy();
    });
  });
}
