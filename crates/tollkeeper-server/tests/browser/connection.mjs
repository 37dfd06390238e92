// The event stream by a fake clock: back-off, a hidden page, sign-out, and announcements.
import assert from "node:assert/strict";
import { ADMIN, Server, browser, eventually, open, run, signIn } from "./lib.mjs";

await run(async () => {
  const server = await Server.with(`${ADMIN}limits: [{ name: per-user, by: user, rate: 5/day }]\n`);
  const page = await open(await browser());
  await page.clock.install({ time: new Date("2026-11-18T12:00:00Z") });
  // The event stream is replaced: each attempt is noted with the time of the fake clock, and refused while `isDown`.
  await page.addInitScript(() => {
    const fetch = window.fetch.bind(window);
    Object.assign(window, { attempts: [], announced: [], calls: 0, isDown: false, isHidden: false });
    Object.defineProperty(document, "hidden", { get: () => window.isHidden });
    window.hide = (hidden) => {
      window.isHidden = hidden;
      document.dispatchEvent(new Event("visibilitychange"));
    };
    window.fetch = (path, options) => {
      window.calls++;
      if (path !== "v1/events") return fetch(path, options);
      window.attempts.push(Date.now());
      if (window.isDown) return Promise.reject(new TypeError("refused"));
      return Promise.resolve(new Response(new ReadableStream({ start: (to) => (window.stream = to) }), { status: 200 }));
    };
    let t = 1760000000;
    window.send = (state) => window.stream.enqueue(new TextEncoder().encode(`data: ${JSON.stringify({ t: t++, version: 1, source: "file", shadowed: false, error: null, requests: { allowed: 1, refused: 0, degraded: 0 },
      limits: {}, store: { state, p99_ms: null }, keys: t, max_keys: 1000000 })}\n\n`));
    addEventListener("DOMContentLoaded", () => new MutationObserver(() => window.announced.push([Date.now(), document.getElementById("live").textContent])).observe(document.getElementById("live"), { childList: true, characterData: true, subtree: true }));
  });
  await page.goto(server.url);
  await signIn(page);
  await page.waitForFunction(() => window.stream);
  await page.clock.pauseAt(new Date("2026-11-18T13:00:00Z"));
  const get = (name) => page.evaluate((name) => window[name], name);
  const change = (values) => page.evaluate((values) => Object.assign(window, values), values);
  /** Lets time pass, second by second, so that each attempt ends before the next second. */
  const pass = async (seconds) => {
    for (let second = 0; second < seconds; second++) await page.clock.runFor(1000);
  };

  // Announcements: at most once in ten seconds, however often the state changes.
  for (let turn = 0; turn < 60; turn++) {
    const state = ["ok", "open", "half-open"][turn % 3];
    await page.evaluate((state) => window.send(state), state);
    await eventually("the event is shown", async () => (await page.textContent(".tiles")).includes(`Store${state}`));
    await pass(1);
  }
  const announced = await get("announced");
  assert.ok(announced.length >= 3, `there are announcements: ${JSON.stringify(announced)}`);
  for (const [index, [at]] of announced.entries()) assert.ok(!index || at - announced[index - 1][0] >= 10000, JSON.stringify(announced));

  // Back-off: 1, 2, 4, 8, 16, 30, 30 s.
  await change({ isDown: true, attempts: [] });
  const lost = await page.evaluate(() => (window.stream.close(), Date.now()));
  await page.waitForSelector("#banner", { state: "visible" });
  await pass(95);
  const gaps = (await get("attempts")).map((at, index, all) => (at - (index ? all[index - 1] : lost)) / 1000);
  assert.deepEqual(gaps.map(Math.round), [1, 2, 4, 8, 16, 30, 30]);

  // A hidden page asks for nothing; a visible one continues at once.
  await page.evaluate(() => window.hide(true));
  const calls = await get("calls");
  await pass(120);
  assert.equal(await get("calls"), calls, "nothing is read while the page is hidden");
  await change({ isDown: false, attempts: [], stream: null });
  await page.evaluate(() => window.hide(false));
  await page.waitForFunction(() => window.stream);
  await page.evaluate(() => window.send("ok"));
  await page.waitForSelector("#banner", { state: "hidden" });
  const attempts = (await get("attempts")).length;
  assert.equal(attempts, 1);

  // Signed out while it waits to connect again: it does not.
  await change({ isDown: true });
  await page.evaluate(() => window.stream.close());
  await page.waitForSelector("#banner", { state: "visible" });
  await page.click("#sign-out");
  await page.waitForSelector("#sign-in", { state: "visible" });
  const before = await get("calls");
  await pass(120);
  assert.equal(await get("calls"), before, "signed out, the page asks for nothing");
});
