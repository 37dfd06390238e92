// Runs the programs of docs/node.md, which tests/tests/client_node.rs writes to the folder `page`.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { readdirSync } from "node:fs";
import { test } from "node:test";
import { freePort, start, until } from "./helper.mjs";

const run = (...args) => execFileSync(process.execPath, args, { cwd: "page", encoding: "utf8" });

test("every program of the page is known here", () => {
  assert.deepEqual(readdirSync("page").sort(), ["app.mjs", "budget.mjs", "limits.test.mjs", "start.mjs"]);
});

test("the start, the budget and the test run as shown", () => {
  assert.equal(run("start.mjs"), "served, 19 left\n");
  assert.equal(run("budget.mjs"), "7800 left\n");
  const env = { ...process.env, NODE_TEST_CONTEXT: undefined };
  const tested = execFileSync(process.execPath, ["--test", "limits.test.mjs"], { cwd: "page", encoding: "utf8", env });
  assert.match(tested, /pass 1\n/);
});

test("the Express app counts failed logins and shows usage", async () => {
  const port = await freePort();
  start(process.execPath, ["app.mjs"], { cwd: "page", env: { ...process.env, PORT: String(port) } });
  const url = `http://127.0.0.1:${port}`;
  await until(() => fetch(`${url}/healthz`).then(() => true, () => false));
  const login = async (password) => {
    const body = JSON.stringify({ email: "alice@example.test", password });
    return (await fetch(`${url}/login`, { method: "POST", body, headers: { "content-type": "application/json" } })).status;
  };
  assert.equal(await login("secret"), 200);
  for (let guess = 0; guess < 5; guess++) assert.equal(await login("guess"), 401);
  assert.equal(await login("secret"), 429);
  const [usage] = await (await fetch(`${url}/usage`)).json();
  assert.deepEqual([usage.name, usage.limit], ["per-ip", 20]);
  assert.ok(usage.remaining < 20);
});
