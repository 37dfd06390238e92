// From a refused key with a hashed fact to its state, and unblocked; the secret appears nowhere.
import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { ADMIN, Server, browser, eventually, open, quiet, run, signIn, view } from "./lib.mjs";

const SECRET = "very-secret-api-key";
const LIMITS = `${ADMIN}
http: { facts: { api_key: { from: header.authorization, hash: true } } }
limits:
  - { name: per-key, by: api_key, rate: 3/day, algorithm: fixed-window, when: { route: /orders } }
`;

await run(async () => {
  const server = await Server.with(LIMITS);
  const facts = { api_key: SECRET, route: "/orders" };
  await server.check(facts, 5);
  const context = await browser();
  await context.grantPermissions(["clipboard-write", "clipboard-read"]);
  const bodies = [];
  context.on("response", async (response) => bodies.push(await response.text().catch(() => "")));
  const page = await open(context, server.url);
  await signIn(page);
  const hash = createHash("sha256").update(SECRET).digest("hex");
  const link = `a:has-text("sha256:${hash.slice(0, 12)}")`;
  await page.click(link);
  await page.waitForSelector("text=What is stored for this key");
  const row = await page.textContent("main tbody tr");
  assert.ok(row.includes("per-key") && row.includes("0") && row.includes("in "), row);
  await page.click("text=Copy curl");
  assert.ok((await page.evaluate(() => navigator.clipboard.readText())).startsWith("curl -X DELETE"));

  await page.click("main button:has-text('Unblock')");
  const dialog = await page.textContent("#confirm-text");
  assert.ok(dialog.includes("per-key") && dialog.includes(hash.slice(0, 12)), dialog);
  await page.click("#confirm button:has-text('Cancel')");
  assert.equal((await server.check(facts)).allowed, false, "cancelled, nothing changed");
  await page.click("main button:has-text('Unblock')");
  await page.click("#confirm-yes");
  await page.waitForSelector("text=Unblocked");
  await page.waitForSelector("text=Nothing is stored for this key");
  assert.equal((await server.check(facts)).allowed, true, "the next request passes");

  // By typed facts: explain and peek side by side.
  await server.check(facts, 4);
  await view(page, "#/key");
  await page.fill("#facts", `api_key=sha256:${hash.slice(0, 32)} route=/orders`);
  await page.press("#facts", "Enter");
  await page.waitForSelector("text=Each limit");
  const explained = await page.textContent("main table");
  assert.ok(explained.includes("applies: 3 per day"), explained);

  // One click to an override: blocked, and the override is named where it applies.
  await view(page, "#/overrides?limit=per-key&value=" + encodeURIComponent(`sha256:${hash.slice(0, 12)}`));
  await page.waitForSelector("select[name=limit] option", { state: "attached" });
  await page.selectOption("select[name=kind]", "unlimited");
  await page.fill("input[name=note]", "ticket 4711");
  await page.click("main button:has-text('Set')");
  await page.waitForSelector("text=is in force");
  await page.waitForSelector("td:has-text('ticket 4711')");
  assert.equal((await server.check(facts, 9)).allowed, true);
  await page.click("main button:has-text('Remove')");
  await page.click("#confirm-yes");
  await page.waitForSelector("text=There are no overrides");
  assert.equal((await server.check(facts)).allowed, false);

  const dom = await page.content();
  for (const secret of [SECRET, hash.slice(0, 32)]) {
    assert.ok(!dom.includes(secret), "not in the page");
    assert.ok(!bodies.some((body) => body.includes(secret)), "not in a response");
  }
  quiet(page);
});
