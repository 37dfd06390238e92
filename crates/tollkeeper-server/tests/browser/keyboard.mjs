// Every view with Tab and Enter only, and the keys that `?` lists.
import assert from "node:assert/strict";
import { ADMIN, Server, TOKEN, browser, eventually, open, quiet, run } from "./lib.mjs";

const LIMITS = `${ADMIN}limits: [{ name: per-user, by: user, rate: 3/day }, { name: second, by: user, rate: 9/day }]\n`;

await run(async () => {
  const server = await Server.with(LIMITS);
  await server.check({ user: "alice" }, 6);
  const page = await open(await browser(), server.url);
  const press = (key) => page.keyboard.press(key);
  /** Presses Tab until an element that matches is focused, and visibly so. */
  const tabTo = async (selector) => {
    for (let turn = 0; turn < 120; turn++) {
      await press("Tab");
      const found = await page.evaluate((wanted) => {
        const focused = document.activeElement;
        if (!focused?.matches(wanted)) return null;
        const box = focused.getBoundingClientRect();
        return { seen: box.width > 0 && box.height > 0, outline: getComputedStyle(focused).outlineStyle };
      }, selector);
      if (!found) continue;
      assert.ok(found.seen && found.outline !== "none", `${selector} is focused visibly: ${JSON.stringify(found)}`);
      return;
    }
    assert.fail(`${selector} cannot be reached with Tab`);
  };
  const titled = (words) => eventually(`the view ${words}`, async () => (await page.title()).startsWith(words));
  const nav = async (name, hash) => {
    await tabTo(`nav a[href="${hash}"]`);
    await press("Enter");
    await titled(name);
  };

  await page.waitForSelector("#token", { state: "visible" });
  await tabTo("#token");
  await page.keyboard.type(TOKEN);
  await press("Enter");
  await page.waitForSelector("a[href='#/limits/per-user']");
  await tabTo('input[value="1h"], input[value="5m"]');
  await press("ArrowRight");
  await tabTo("summary");
  await press("Enter");
  await page.waitForSelector(".scroll table");
  await tabTo("a[href='#/limits/per-user']");
  await press("Enter");
  await titled("per-user");
  await page.waitForSelector("a[href^='#/key/']");
  await tabTo("a[href^='#/key/']");
  await press("Enter");
  await titled("Key");
  await page.waitForSelector("main button.danger");
  await tabTo("main button.danger");
  await press("Enter");
  await page.waitForSelector("#confirm[open]");
  await tabTo("#confirm-yes");
  await press("Enter");
  await page.waitForSelector("text=Unblocked");
  assert.equal((await server.check({ user: "alice" })).allowed, true);

  await nav("Try", "#/try");
  await tabTo("main input");
  await tabTo("main label:nth-of-type(2) input");
  await page.keyboard.type("bob");
  await press("Enter");
  await page.waitForSelector("text=What each limit says");
  await tabTo("main button.danger");
  await press("Enter");
  await page.waitForSelector("text=allowed and charged");
  await nav("Policy", "#/policy");
  await page.waitForFunction(() => document.querySelector("textarea")?.value.includes("per-user"));
  await tabTo("textarea");
  await tabTo("main button.primary");
  await press("Enter");
  await page.waitForSelector("text=It changes nothing");
  await nav("Overrides", "#/overrides");
  await page.waitForSelector("select option", { state: "attached" });
  await tabTo("input[name=value]");
  await page.keyboard.type("carol");
  await tabTo("input[name=rate]");
  await page.keyboard.type("7/day");
  await press("Enter");
  await page.waitForSelector("td:has-text('7/day')");

  await page.evaluate(() => document.activeElement.blur());
  for (const [keys, title] of [["gn", "Now"], ["gl", "per-user"], ["gt", "Try"], ["gp", "Policy"], ["go", "Overrides"], ["gk", "Key"]]) {
    for (const key of keys) await press(key);
    await titled(title);
  }
  await press("?");
  await page.waitForSelector("#keys-dialog[open]");
  await press("Escape");
  await press("/");
  await eventually("the field is focused", () => page.evaluate(() => document.activeElement?.id === "facts"));
  await page.keyboard.type("user=bob");
  await press("Enter");
  await page.waitForSelector("text=Each limit");
  await tabTo("#sign-out");
  await press("Enter");
  await page.waitForSelector("#sign-in", { state: "visible" });
  quiet(page);
});
