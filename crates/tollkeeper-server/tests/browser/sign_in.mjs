// Sign-in, an empty console, and no request that leaves the origin.
import assert from "node:assert/strict";
import { ADMIN, Server, TOKEN, browser, eventually, open, quiet, run, signIn, view } from "./lib.mjs";

await run(async () => {
  const server = await Server.with(`${ADMIN}limits: [{ name: per-user, by: user, rate: 5/day }]\n`);
  // The page works without any network but the server itself.
  const context = await browser({}, ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--proxy-server=http://127.0.0.1:9", "--proxy-bypass-list=127.0.0.1"]);
  const answers = [];
  context.on("response", async (response) => answers.push([new URL(response.url()).pathname, response.status()]));
  const page = await open(context, server.url);
  await page.waitForSelector("#sign-in", { state: "visible" });
  const storage = () => page.evaluate(() => JSON.stringify({ ...sessionStorage, ...localStorage }) + document.cookie);
  const data = () => answers.filter(([path, status]) => path.startsWith("/v1") && status === 200);
  await eventually("the page has asked", () => answers.some(([path]) => path === "/v1/top"));
  assert.deepEqual(data(), [], "no data before sign-in");
  assert.equal(await page.isVisible("#nav"), false);

  await signIn(page, "wrong");
  await eventually("the error is shown", async () => (await page.textContent("#sign-in-error")).includes("did not accept"));
  assert.deepEqual(data(), []);
  await signIn(page);
  await page.waitForSelector("#nav", { state: "visible" });
  await page.waitForSelector(".tile");
  assert.equal(await storage(), "{}", "nothing is stored unless the user asks for it");
  await page.reload();
  await page.waitForSelector("#sign-in", { state: "visible" });
  await signIn(page, TOKEN, true);
  await page.waitForSelector(".tile");
  assert.ok((await storage()).includes(TOKEN), "stay signed in for this tab");
  await page.reload();
  await page.waitForSelector(".tile");
  await view(page, "#/policy");
  await page.waitForSelector("textarea");
  await page.goBack();
  await eventually("the back button works", async () => (await page.title()).startsWith("Now"));
  await page.click("#sign-out");
  await page.waitForSelector("#sign-in", { state: "visible" });
  assert.equal(await storage(), "{}");
  assert.equal(await page.isVisible(".tile"), false, "no data is left on the page");
  const before = data().length;
  await new Promise((resolve) => setTimeout(resolve, 1500));
  assert.equal(data().length, before, "signed out, the page asks for nothing");

  for (const url of page.requests) assert.ok(url.startsWith(server.url), url);
  assert.ok(!page.requests.some((url) => url.includes(TOKEN)), "the token is in no URL");
  quiet(page);
  const missing = answers.filter(([, status]) => status === 404);
  assert.deepEqual(missing, []);
});
