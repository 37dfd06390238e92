// Overrides whose limit is not active any more are listed, and can be removed but not changed.
import assert from "node:assert/strict";
import { ADMIN, Server, browser, eventually, open, quiet, run, signIn, view } from "./lib.mjs";

const LIMITS = [{ name: "per-user", by: "user", rate: "5/day" }, { name: "old", by: "user", rate: "5/day" }];

await run(async () => {
  const server = await Server.with(`${ADMIN}limits: ${JSON.stringify(LIMITS)}\n`);
  for (const path of ["per-user/alice", "old/bob"]) await server.call("PUT", `/v1/overrides/${path}`, { blocked: true });
  const page = await open(await browser(), server.url);
  await signIn(page);
  await view(page, "#/overrides");
  await page.waitForSelector("text=2 of 2 overrides");
  const row = (name) => page.locator(`main tr:has-text("${name}")`);
  await eventually("both can be changed", async () => (await page.locator("main button:has-text('Change')").count()) === 2);

  // While the page is open, and after it is opened.
  assert.equal((await server.call("PUT", "/v1/limits", { limits: LIMITS.slice(0, 1) })).status, 200);
  await page.waitForSelector("text=(limit not active)");
  await page.reload();
  await signIn(page);
  await page.waitForSelector("text=(limit not active)");
  assert.match(await row("bob").textContent(), /old \(limit not active\)/);
  assert.equal(await row("bob").locator("button:has-text('Change')").count(), 0);
  assert.equal(await row("alice").locator("button:has-text('Change')").count(), 1);
  assert.ok(!(await row("alice").textContent()).includes("not active"));
  await row("bob").locator("button:has-text('Remove')").click();
  await page.click("#confirm-yes");
  await page.waitForSelector("text=1 of 1 overrides");
  const left = (await server.call("GET", "/v1/overrides")).data.overrides;
  assert.deepEqual(left.map((it) => it.key), ["alice"]);
  quiet(page);
});
