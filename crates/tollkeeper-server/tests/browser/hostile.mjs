// Values with markup, right-to-left marks and 1 KiB, and limits with the names of object properties, are text.
import assert from "node:assert/strict";
import { ADMIN, Server, browser, eventually, open, quiet, run, signIn, view } from "./lib.mjs";

const LIMITS = `${ADMIN}
limits:
  - { name: constructor, by: user, rate: 1/day }
  - { name: __proto__, by: user, rate: 1/day }
  - { name: hasownproperty, by: user, rate: 1/day, mode: shadow }
`;
const USERS = ["<img src=x onerror=window.ran=1>", '"><script>window.ran=2</script>', "\u202eevil\u202c", "x".repeat(1024), "javascript:window.ran=3", "{{7*7}}", "'`${window.ran=4}"];

await run(async () => {
  const server = await Server.with(LIMITS);
  for (const user of USERS) await server.check({ user }, 3);
  const page = await open(await browser(), server.url);
  await signIn(page);
  for (const name of ["constructor", "__proto__", "hasownproperty"]) await page.waitForSelector(`th:has-text("${name}")`);
  await eventually("the keys are shown as text", async () => {
    const text = await page.textContent("main");
    return USERS.filter((user) => user.length < 40).every((user) => text.includes(user));
  });
  for (const name of ["constructor", "__proto__"]) {
    await view(page, `#/limits/${name}`);
    await eventually(`the totals of ${name}`, async () => (await page.textContent("#totals")).includes("7 allowed, 14 refused"));
  }
  for (const user of USERS) {
    await view(page, `#/try?${new URLSearchParams({ user })}`);
    await page.waitForSelector("text=What each limit says");
    if (user.length > 1000) {
      const cut = await page.$eval("td bdi", (it) => [it.textContent, it.title]);
      assert.ok(cut[0].length < 60 && cut[0].includes("x…x") && cut[1] === user, "cut in the middle, the whole in a tooltip");
    }
    await view(page, `#/key?${new URLSearchParams({ user })}`);
    await page.waitForSelector("text=Each limit");
    await server.call("PUT", `/v1/overrides/constructor/${encodeURIComponent(user)}`, { blocked: true, note: user.slice(0, 200) });
  }
  await view(page, "#/overrides");
  await page.waitForSelector("text=7 of 7 overrides");
  // A fact called `limit` is not the name of the limit.
  await view(page, `#/key?${new URLSearchParams({ user: USERS[0], limit: "hasownproperty" })}`);
  await page.click("tr:has-text('__proto__') button:has-text('Unblock')");
  assert.ok((await page.textContent("#confirm-text")).includes("__proto__"));
  await page.click("#confirm-yes");
  await page.waitForSelector("text=under __proto__.");
  const state = (limit) => server.call("GET", `/v1/state?${new URLSearchParams({ limit, user: USERS[0] })}`);
  assert.deepEqual((await state("__proto__")).data.limits, []);
  assert.notDeepEqual((await state("hasownproperty")).data.limits, []);
  await view(page, "#/limits/<img src=x onerror=window.ran=5>");
  await page.waitForSelector("text=This limit is not active");
  await view(page, "#/key/%E0%A4%A");
  await page.waitForSelector("text=unknown `ref`");
  assert.equal(await page.evaluate(() => window.ran), undefined, "nothing runs");
  assert.equal(await page.$("main img, main script"), null);
  // The invalid reference is a 400, which the browser notes.
  page.log = page.log.filter((line) => !line.includes("400 (Bad Request)"));
  quiet(page);
});
