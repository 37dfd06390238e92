// Two tabs change the limits: the second is told and loses nothing. Errors have a line and a column.
import assert from "node:assert/strict";
import { ADMIN, Server, browser, eventually, open, run, signIn, view } from "./lib.mjs";

const LIMITS = `${ADMIN}
limits:
  - { name: per-user, by: user, rate: 5/day }
  - { name: trial, by: user, rate: 2/day, mode: shadow }
`;
const text = (page) => page.inputValue("textarea");
const edit = async (page, from, to) => {
  const before = await text(page);
  assert.ok(before.includes(from), before);
  await page.fill("textarea", before.replace(from, to));
};
const put = async (page) => {
  await page.click("main button:has-text('Put in force')");
  await page.click("#confirm-yes");
};

await run(async () => {
  const server = await Server.with(LIMITS);
  const context = await browser();
  const tabs = [await open(context, server.url), await open(context, server.url)];
  for (const tab of tabs) {
    await signIn(tab);
    await view(tab, "#/policy");
    await tab.waitForFunction(() => document.querySelector("textarea")?.value.includes("per-user"));
  }
  const [one, two] = tabs;
  await edit(one, "5/day", "6/day");
  await one.click("text=Check text");
  await one.waitForSelector("td:has-text('kept')");
  assert.ok((await one.textContent("pre.out")).includes('+       "rate": "6/day"'), "the difference is shown");
  assert.equal((await server.call("GET", "/v1/limits")).data.version, 1, "checking changes nothing");
  await put(one);
  await one.waitForSelector("text=Version 2 is in force in this process (persistent: false)");
  await eventually("shadowed is shown", async () => (await one.textContent("main")).includes("shadowed"));

  await edit(two, "5/day", "7/day");
  const mine = await text(two);
  await put(two);
  await two.waitForSelector("text=Another change came first: version 2 is active");
  assert.equal(await text(two), mine, "the text is kept");
  assert.ok((await two.textContent("pre.out")).includes("6/day"), "the other version is shown");
  await two.click("text=Replace version 2 with my text");
  await put(two);
  await two.waitForSelector("text=Version 3 is in force");
  assert.equal((await server.call("GET", "/v1/limits")).data.limits[0].rate, "7/day");

  await edit(two, "7/day", "7/1 mn");
  await two.click("text=Check text");
  await two.waitForSelector("pre.bad");
  assert.match(await two.textContent("pre.bad"), /limits:\d+:\d+: error/);
  await view(two, "#/");
  await eventually("the tile says that the file is shadowed", async () => (await two.textContent(".tiles")).includes("shadowed"));

  // A shadow limit fills the editor, and changes nothing.
  await view(two, "#/limits/trial");
  await server.check({ user: "alice" }, 4);
  await two.waitForSelector("text=it would have refused");
  await eventually("the keys it would refuse", async () => (await two.textContent("main")).includes("Keys it would refuse") && (await two.textContent("main")).includes("alice"));
  await two.click("text=Turn to enforce");
  await two.waitForFunction(() => document.querySelector("textarea")?.value.includes("trial"));
  const filled = JSON.parse(await text(two)).limits;
  assert.deepEqual(filled.map((limit) => limit.mode), ["enforce", "enforce"]);
  assert.equal((await server.call("GET", "/v1/limits")).data.limits[1].mode, "shadow");
  await two.click("text=Back to the file");
  await two.click("#confirm-yes");
  await two.waitForSelector("text=The limits of the file are active");
  assert.equal((await server.call("GET", "/v1/limits")).data.limits[0].rate, "5/day");
  server.change(LIMITS.replace("5/day", "5/dey"));
  await view(two, "#/");
  await eventually("the broken file is reported", async () => (await two.textContent(".tiles")).includes("the file was not loaded"));
});
