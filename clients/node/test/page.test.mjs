// Runs the programs of docs/node.md, which tests/tests/client_node.rs writes to the folder `page`.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { readdirSync } from "node:fs";
import { test } from "node:test";
import { WebSocket } from "ws";
import { freePort, redis, server, start, until } from "./helper.mjs";

const run = (...args) => execFileSync(process.execPath, args, { cwd: "page", encoding: "utf8" });

/** Starts a program that listens on `PORT`; returns its URL. */
async function serving(file, path, env = {}) {
  const port = await freePort();
  start(process.execPath, [file], { cwd: "page", env: { ...process.env, ...env, PORT: String(port) } });
  const url = `http://127.0.0.1:${port}`;
  await until(() => fetch(url + path).then(() => true, () => false));
  return url;
}

test("every program of the page is known here", () => {
  const run = ["app.mjs", "budget.mjs", "limits.test.mjs", "remote.mjs", "sockets.mjs", "start.mjs", "store.mjs"];
  assert.deepEqual(readdirSync("page").sort(), run);
});

test("the start, the budget and the test run as shown", () => {
  assert.equal(run("start.mjs"), "served, 19 left\n");
  assert.equal(run("budget.mjs"), "7800 left\n");
  const env = { ...process.env, NODE_TEST_CONTEXT: undefined };
  const tested = execFileSync(process.execPath, ["--test", "limits.test.mjs"], { cwd: "page", encoding: "utf8", env });
  assert.match(tested, /pass 1\n/);
});

test("the Express app counts failed logins and shows usage", async () => {
  const url = await serving("app.mjs", "/healthz");
  const login = async (password) => {
    const body = JSON.stringify({ email: "alice@example.test", password });
    const headers = { "content-type": "application/json" };
    return (await fetch(`${url}/login`, { method: "POST", body, headers })).status;
  };
  assert.equal(await login("secret"), 200);
  for (let guess = 0; guess < 5; guess++) assert.equal(await login("guess"), 401);
  assert.equal(await login("secret"), 429);
  const [usage] = await (await fetch(`${url}/usage`)).json();
  assert.deepEqual([usage.name, usage.limit], ["per-ip", 20]);
  assert.ok(usage.remaining < 20);
});

test("the program for a server asks it", async () => {
  const { http } = await server("limits: [{ name: per-user, by: user, rate: 1000/min }]");
  const env = { ...process.env, TOLLKEEPER_SERVER: http };
  const ask = () => execFileSync(process.execPath, ["remote.mjs"], { cwd: "page", encoding: "utf8", env });
  // On a busy machine the server may not answer within the 200 ms of the page.
  await until(() => ask() === "true null\n");
});

test("the program for sockets admits two of them", async () => {
  const port = await freePort();
  start(process.execPath, ["sockets.mjs"], { cwd: "page", env: { ...process.env, PORT: String(port) } });
  const open = () =>
    new Promise((resolve) => {
      const client = new WebSocket(`ws://127.0.0.1:${port}/`);
      client.on("open", () => resolve(client));
      client.on("error", (error) => resolve(error.message));
    });
  let first;
  await until(async () => typeof (first = await open()) !== "string");
  const second = await open();
  assert.equal(await open(), "Unexpected server response: 429");
  for (const client of [first, second]) client.terminate();
});

test("the program with express-rate-limit counts in the store", async () => {
  const url = await serving("store.mjs", "/", { REDIS_URL: (await redis()).url });
  const remaining = async () => Number((await fetch(url)).headers.get("x-ratelimit-remaining"));
  // On a busy machine Redis may not answer within its deadline, and then nothing is counted.
  await until(async () => (await remaining()) < 95);
});
