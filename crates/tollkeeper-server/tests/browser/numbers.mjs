// The numbers on the page equal /metrics, and the chart's table sums to them.
import assert from "node:assert/strict";
import { ADMIN, Server, browser, eventually, open, quiet, run, signIn, view } from "./lib.mjs";

const LIMITS = `${ADMIN}
limits:
  - { name: few, by: user, rate: 40/day, burst: 40 }
  - { name: many, by: user, rate: 1000/day, burst: 1000 }
  - { name: trial, by: user, rate: 10/day, mode: shadow }
`;

await run(async () => {
  const server = await Server.with(LIMITS);
  const page = await open(await browser(), server.url);
  await signIn(page);
  await page.waitForSelector("figure path", { state: "attached" });
  const checks = [];
  for (let turn = 0; turn < 300; turn++) checks.push({ facts: { user: `user-${turn % 6}` } });
  // In parts, so that several steps of the chart have counts.
  for (let part = 0; part < 3; part++) {
    await server.call("POST", "/v1/check/batch", { checks: checks.slice(part * 100, part * 100 + 100) });
    await new Promise((resolve) => setTimeout(resolve, 1100));
  }
  const metric = (name) => server.metric(name);
  const expected = {
    allowed: await metric('tollkeeper_requests_total{transport="http",route="",result="allowed"}'),
    refused: await metric('tollkeeper_requests_total{transport="http",route="",result="refused"}'),
  };
  assert.equal(expected.allowed + expected.refused, 300);
  assert.ok(expected.refused > 0);
  const shown = `${expected.allowed} allowed, ${expected.refused} refused, 0 degraded`;
  await eventually("the tile has the counts", async () => (await page.textContent(".tiles")).includes(shown));
  await eventually("the summary has the counts", async () => (await page.textContent("figcaption")).startsWith(shown));

  const tableSums = async () => {
    await page.click("summary");
    await page.waitForSelector(".scroll table");
    return page.$$eval(".scroll tbody tr", (rows) => rows.reduce((sums, row) => sums.map((sum, index) => sum + Number(row.cells[index + 1].textContent.replaceAll(",", ""))), [0, 0, 0]));
  };
  assert.deepEqual(await tableSums(), [expected.allowed, expected.refused, 0]);
  for (const span of ["1h", "24h"]) {
    await page.check(`input[value="${span}"]`);
    await eventually(`the summary of ${span}`, async () => (await page.textContent("figcaption")).startsWith(shown));
  }
  for (const name of ["few", "many", "trial"]) {
    await view(page, `#/limits/${name}`);
    const count = (result) => metric(`tollkeeper_checks_total{limit="${name}",result="${result}"}`);
    const counts = [await count("allowed"), await count("refused"), await count("would_refuse")];
    await eventually(`the totals of ${name}`, async () => (await page.textContent("#totals")).includes(`${counts[0]} allowed, ${counts[1]} refused, ${counts[2]} would refuse`));
    assert.deepEqual(await tableSums(), counts, name);
    const bars = await page.locator("figure").nth(1).locator("tbody td").allTextContents();
    assert.equal(bars.reduce((sum, n) => sum + Number(n.replaceAll(",", "")), 0), counts[0] + counts[1] + counts[2], `the histogram of ${name}`);
  }
  quiet(page);
});
