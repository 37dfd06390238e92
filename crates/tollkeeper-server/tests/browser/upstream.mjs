// The view of the upstream, with a real proxy: requests in flight, the limit, refusals at the limit, failures and ejection.
import assert from "node:assert/strict";
import { createServer } from "node:http";
import { join } from "node:path";
import { ADMIN, MODES, SCREENSHOTS, Server, browser, eventually, freePort, open, problems, quiet, run, signIn } from "./lib.mjs";

await run(async () => {
  // An upstream with one address that answers when it is told to. The other address of its name refuses connections.
  const port = await freePort();
  const held = [];
  const upstream = createServer((request, response) => (request.url === "/held" ? held.push(response) : response.end("hello")));
  await new Promise((resolve) => upstream.listen(port, "127.0.0.1", resolve));
  const yaml = `${ADMIN}proxy: { concurrency: { max: 3 }, health: { failures: 1, eject: 60s } }\nlimits: [{ name: per-ip, by: ip, rate: 1000/s }]\n`;
  const server = await Server.with(yaml, [], `http://localhost:${port}`);
  const get = (path) => fetch(`http://127.0.0.1:${server.proxyPort}${path}`);
  const page = await open(await browser(), server.url);
  await signIn(page);
  await page.waitForSelector("nav a:has-text('Upstream')");
  await page.click("nav a:has-text('Upstream')");
  await eventually("the view is shown", async () => (await page.title()).startsWith("Upstream"));
  const shows = (words) => eventually(`the view shows ${words}`, async () => (await page.textContent("#view")).includes(words));
  await shows(`http://localhost:${port}`);
  await shows("at most 3");
  await shows(`127.0.0.1:${port}`);

  const answers = [1, 2, 3].map(() => get("/held"));
  await eventually("three requests are held", () => held.length === 3);
  await shows("In flight3");
  const shed = await get("/other");
  assert.equal(shed.status, 503);
  await shows("Shed1");
  assert.ok(await page.$(".tile.alarm:has-text('In flight')"), "the tile at the limit is an alarm");
  for (const [mode, options] of MODES) {
    const shown = await open(await browser({ ...options, bypassCSP: true, reducedMotion: "reduce" }), `${server.url}/#/upstream`);
    await signIn(shown);
    await shown.waitForSelector(".tile:has-text('Shed')");
    assert.deepEqual(await problems(shown), [], mode);
    await shown.screenshot({ path: join(SCREENSHOTS, `upstream-${mode}.png`), fullPage: true });
  }
  for (const response of held) response.end("done");
  for (const answer of answers) assert.equal((await answer).status, 200);
  await shows("In flight0");

  // The service ends: failures are counted for its addresses.
  upstream.closeAllConnections();
  await new Promise((resolve) => upstream.close(resolve));
  assert.equal((await get("/gone")).status, 502);
  const errors = async () => (await page.locator(`main tbody tr:has-text("127.0.0.1:${port}") td`).nth(1).textContent()).trim();
  await eventually("the failures of the address", async () => Number(await errors()) > 0);
  const addresses = await page.locator("main tbody tr").count();
  if (addresses > 1) await shows("ejected");
  quiet(page);

  // A server that is no proxy has no such view.
  const plain = await Server.with(`${ADMIN}limits: []\n`);
  const other = await open(await browser(), plain.url);
  await signIn(other);
  await other.waitForSelector(".tile");
  assert.equal(await other.isVisible("nav a:has-text('Upstream')"), false);
});
