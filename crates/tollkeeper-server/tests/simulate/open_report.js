// Opens a report in Chromium and prints what happened as JSON. Arguments: the file, a folder for screenshots.
const { chromium } = require("playwright-core");
const axe = require("axe-core");

const [file, folder] = process.argv.slice(2);
const args = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync",
];

async function main() {
  const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", args });
  const found = { dialogs: 0, errors: [], requests: [], axe: [] };

  const plain = await browser.newPage();
  plain.on("dialog", (dialog) => { found.dialogs += 1; dialog.dismiss(); });
  plain.on("console", (message) => found.errors.push(message.text()));
  plain.on("pageerror", (error) => found.errors.push(String(error)));
  plain.on("request", (request) => found.requests.push(request.url()));
  await plain.goto("file://" + file);
  found.ran = await plain.evaluate(() => window.ran ?? null);
  found.elements = await plain.evaluate(() => document.querySelectorAll("img,iframe,script[src],a[href]").length);
  const counts = () => plain.evaluate(() =>
    [...document.querySelector("table").tBodies[0].rows].map((row) => Number(row.cells[3].dataset.value)));
  const refused = plain.locator("table").first().getByRole("button", { name: "Refused", exact: true });
  await refused.click();
  found.descending = await counts();
  await refused.click();
  found.ascending = await counts();

  for (const colorScheme of ["light", "dark"]) {
    // The policy of the page lets no other script run, so axe needs a page without it.
    const context = await browser.newContext({ bypassCSP: true, colorScheme });
    const page = await context.newPage();
    await page.goto("file://" + file);
    await page.evaluate(axe.source);
    const result = await page.evaluate(() => window.axe.run());
    found.axe.push(...result.violations.map((violation) => `${colorScheme}: ${violation.id}: ${violation.help}`));
    await page.screenshot({ path: `${folder}/${colorScheme}.png`, fullPage: true });
  }

  const still = await browser.newContext({ javaScriptEnabled: false });
  const page = await still.newPage();
  await page.goto("file://" + file);
  found.text = await page.locator("main").innerText();
  found.pictures = await page.locator("svg[role=img]").count();
  await browser.close();
  console.log(JSON.stringify(found));
}

main().catch((error) => { console.error(error); process.exit(1); });
