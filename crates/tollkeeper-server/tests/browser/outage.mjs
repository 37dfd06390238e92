// Redis stops and comes back; the server restarts; the server is killed.
import assert from "node:assert/strict";
import { ADMIN, Redis, Server, browser, eventually, open, run, signIn } from "./lib.mjs";

await run(async () => {
  const redis = await Redis.start();
  const server = await Server.with(`${ADMIN}store: redis://127.0.0.1:${redis.port}/\nlimits: [{ name: per-user, by: user, rate: 1000/min }]\n`);
  const page = await open(await browser(), server.url);
  await signIn(page);
  await page.waitForSelector(".tile");
  const tile = (words) => async () => (await page.textContent(".tiles")).includes(words);
  await server.check({ user: "alice" }, 5);
  await eventually("the store is ok", tile("Storeok"));
  await redis.stop();
  await server.check({ user: "alice" }, 30);
  await eventually("the store is open", tile("open since"));
  await eventually("decisions are degraded", async () => /[1-9]\d* degraded/.test(await page.textContent(".tiles")));
  assert.equal(await page.getAttribute(".tile.alarm >> nth=0", "class"), "card tile alarm");
  await redis.start();
  await eventually("the store is ok again", async () => {
    await server.check({ user: "alice" });
    return (await page.textContent(".tiles")).includes("Storeok");
  });
  const again = await server.check({ user: "alice" });
  assert.deepEqual([again.allowed, again.degraded, again.limits[0].degraded], [true, null, null], "decisions are not degraded any more");
  const degraded = async () => (await page.textContent(".tiles")).match(/(\d+) degraded/)[1];
  const before = await degraded();
  const asked = await page.textContent(".tile:has-text('Requests') b");
  await server.check({ user: "alice" }, 5);
  await eventually("later decisions are counted", async () => (await page.textContent(".tile:has-text('Requests') b")) !== asked);
  assert.equal(await degraded(), before);

  const banner = () => page.isVisible("#banner");
  await server.kill();
  await eventually("the banner appears", banner);
  assert.match(await page.textContent("#banner"), /no connection for \d+ s; numbers are of \d/);
  await server.start();
  await eventually("the stream is connected again", async () => !(await banner()), 40000);
  await server.check({ user: "bob" }, 7);
  await eventually("the series restart with the server's counts", tile("Requests7"));
  assert.ok(!page.log.some((line) => line.startsWith("error: ") && !line.includes("ERR_") && !line.includes("401")), page.log.join("\n"));
});
