// Every view in light, dark, narrow and at 200 %: screenshots, axe, no horizontal scrolling, and keys only.
import assert from "node:assert/strict";
import { join } from "node:path";
import { ADMIN, MODES, SCREENSHOTS, Server, browser, eventually, open, problems, quiet, run, signIn, view } from "./lib.mjs";

const LIMITS = `${ADMIN}
limits:
  - { name: per-ip, by: ip, rate: 1000/min }
  - { name: per-user, by: user, rate: 100/min, burst: 20 }
  - { name: login, by: email, when: { route: /login }, rate: 5/15m, algorithm: sliding-log }
  - name: plan
    by: api_key
    tier: plan
    tiers: { free: { rate: 60/min, burst: 10 }, pro: { rate: 600/min, burst: 100 } }
    default_tier: free
  - { name: exports, by: user, algorithm: concurrency, limit: 5 }
  - { name: new-search-limit, when: { route: /api/search }, by: user, rate: 10/min, mode: shadow }
http: { facts: { api_key: { from: header.authorization, hash: true } } }
`;

await run(async () => {
  const server = await Server.with(LIMITS);
  const users = ["alice", "bob", "carol", "dave@example.test", "erin", "frank"];
  const traffic = async (rounds) => {
    for (let round = 0; round < rounds; round++) {
      const checks = users.flatMap((user, index) => new Array(1 + index * 2).fill({ facts: { user, ip: `192.0.2.${index}`, api_key: `key-of-${user}`, plan: index % 2 ? "pro" : "free", route: index % 3 ? "/api/search" : "/login", email: user } }));
      await server.call("POST", "/v1/check/batch", { checks });
      await new Promise((resolve) => setTimeout(resolve, 350));
    }
  };
  await traffic(12);
  for (const override of [["per-user", "alice", { rate: "500/min", burst: 50, until: 4102444800, note: "ticket 4711" }], ["per-user", "mallory", { blocked: true, note: "scraper" }], ["per-ip", "192.0.2.7", { unlimited: true }]]) {
    await server.call("PUT", `/v1/overrides/${override[0]}/${override[1]}`, override[2]);
  }
  const top = (await server.call("GET", "/v1/top")).data;
  const refused = top.refused.find((row) => row.limit === "plan") ?? top.refused[0];
  const views = [["now", "#/", "Now"], ["limit", "#/limits/per-user", "per-user"], ["shadow", "#/limits/new-search-limit", "new-search-limit"], ["key", `#/key/${refused.ref}`, "Key"],
    ["key-facts", "#/key?user=frank&route=/api/search", "Key"], ["try", "#/try?user=alice&ip=192.0.2.1", "Try"], ["policy", "#/policy", "Policy"], ["overrides", "#/overrides", "Overrides"]];
  for (const [mode, options] of MODES) {
    const context = await browser({ ...options, bypassCSP: true, reducedMotion: "reduce" });
    const page = await open(context, server.url);
    await page.screenshot({ path: join(SCREENSHOTS, `sign-in-${mode}.png`) });
    const found = [];
    const judge = async (name) => found.push(...(await problems(page)).map((it) => `${mode} ${name}: ${it}`));
    await judge("sign-in");
    await signIn(page);
    await page.waitForSelector("#nav:not([hidden])");
    const busy = traffic(8);
    for (const [name, hash, title] of views) {
      await view(page, hash);
      await eventually(`${name} is shown`, async () => (await page.title()).startsWith(title));
      if (["now", "limit", "shadow"].includes(name)) await page.waitForSelector("figure path[d^=M]", { state: "attached" });
      else await page.waitForLoadState("networkidle", { timeout: 3000 }).catch(() => {}); // never idle while events are streamed
      if (name.startsWith("key") || name === "try") await page.waitForSelector("main table");
      if (name === "policy") await page.waitForFunction(() => document.querySelector("textarea").value.includes("per-user"));
      if (name === "policy") await page.click("text=Check text");
      await new Promise((resolve) => setTimeout(resolve, 300));
      await judge(name);
      await page.screenshot({ path: join(SCREENSHOTS, `${name}-${mode}.png`), fullPage: true });
    }
    await busy;
    quiet(page);
    assert.deepEqual(found, []);
    await context.close();
  }
});
