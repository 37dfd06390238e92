// Limiters open, follow their file, are shared between threads, and end.

import assert from "node:assert/strict";
import { execFileSync, spawnSync } from "node:child_process";
import { readdirSync, renameSync, writeFileSync } from "node:fs";
import { test } from "node:test";
import { Worker } from "node:worker_threads";
import { Limiter } from "tollkeeper";
import { testing } from "tollkeeper/testing";
import { configFile, redis, thrown, until } from "./helper.mjs";

const limits = [{ name: "per-user", by: "user", rate: "5/day", algorithm: "sliding-log" }];
const threads = () => readdirSync("/proc/self/task").length;

/** Runs a script in a process of its own, and returns its output. */
function script(text, env = {}) {
  const ended = spawnSync(process.execPath, ["--input-type=module", "-e", text], {
    encoding: "utf8",
    timeout: 60_000,
    env: { ...process.env, ...env },
  });
  assert.equal(ended.status, 0, ended.stderr);
  return ended;
}

const OPEN = `import { Limiter } from "tollkeeper"; const limiter = new Limiter(${JSON.stringify({ limits })});`;

test("a script that opens a limiter ends by itself", async () => {
  const { url } = await redis();
  const file = configFile("limits: [{ name: per-user, by: user, rate: 5/day }]");
  for (const options of [{ limits }, { limits, store: url }, { config: file }, { server: "http://127.0.0.1:9" }]) {
    const { stdout } = script(`
      import { Limiter } from "tollkeeper";
      const limiter = new Limiter(${JSON.stringify(options)}).on("error", () => {});
      console.log((await limiter.check({ user: "alice" })).allowed);
    `);
    assert.equal(stdout, "true\n");
  }
});

test("require works", () => {
  const code = `const { Limiter } = require("tollkeeper"); const { tollkeeper } = require("tollkeeper/express");
    console.log(new Limiter(${JSON.stringify({ limits })}).checkSync({ user: "alice" }).remaining, typeof tollkeeper)`;
  const args = ["--no-warnings", "--input-type=commonjs", "-e", code];
  const stdout = execFileSync(process.execPath, args, { encoding: "utf8" });
  assert.equal(stdout, "4 function\n");
});

test("close can be called twice, and ends a limiter", async () => {
  const limiter = new Limiter({ limits });
  assert.equal(limiter.checkSync({ user: "alice" }).allowed, true);
  await limiter.close();
  await limiter.close();
  for (const call of [
    () => limiter.check({ user: "alice" }),
    async () => limiter.checkSync({}),
    () => limiter.usage({}),
    async () => limiter.policy,
  ]) {
    assert.equal((await thrown(call)).code, "closed");
  }
});

test("10,000 limiters that were closed leave no thread", async () => {
  const before = threads();
  for (let count = 0; count < 10_000; count++) {
    const limiter = new Limiter({ limits });
    limiter.checkSync({ user: "alice" });
    await limiter.close();
  }
  assert.equal(threads(), before);
});

test("files that were followed leave no thread", async () => {
  const file = configFile("limits: [{ name: per-user, by: user, rate: 5/day }]");
  const before = threads();
  for (let count = 0; count < 50; count++) await new Limiter({ config: file }).close();
  await until(() => threads() <= before);
});

test("worker threads share the engine of a name", async () => {
  const code = `
    import { parentPort } from "node:worker_threads";
    import { Limiter } from "tollkeeper";
    const limiter = new Limiter({ name: "shared", limits: ${JSON.stringify(limits)} });
    let admitted = 0;
    for (let request = 0; request < 5; request++) admitted += limiter.checkSync({ user: "alice" }).allowed;
    parentPort.postMessage(admitted);
  `;
  const limiter = new Limiter({ name: "shared", limits });
  const url = new URL(`data:text/javascript,${encodeURIComponent(code)}`);
  const workers = Array.from({ length: 4 }, () => {
    // A module from a `data:` URL has no packages, so the import is made absolute.
    const resolved = encodeURIComponent(import.meta.resolve("tollkeeper"));
    return new Worker(new URL(String(url).replace("tollkeeper%22", `${resolved}%22`)));
  });
  const message = (worker) => {
    return new Promise((resolve, reject) => worker.on("message", resolve).on("error", reject));
  };
  const admitted = await Promise.all(workers.map(message));
  assert.equal(admitted.reduce((sum, count) => sum + count), 5);
  assert.equal(limiter.checkSync({ user: "alice" }).allowed, false);
  assert.throws(() => new Limiter({ name: "shared", limits: [] }), /shared/);
});

test("a changed file is followed, and keeps its counts", async () => {
  const policy = (rate) => `limits: [{ name: per-user, by: user, rate: ${rate}, algorithm: sliding-log }]\n`;
  const file = configFile(policy("5/day"));
  const write = (text) => {
    writeFileSync(`${file}.new`, text);
    renameSync(`${file}.new`, file);
  };
  const limiter = new Limiter({ config: file });
  const events = [];
  limiter.on("reload", (version) => events.push(version)).on("error", (error) => events.push(error.message));
  assert.deepEqual([limiter.policy.source, limiter.policy.limits[0].rate], ["file", "5/day"]);
  assert.equal(limiter.checkSync({ user: "alice" }).remaining, 4);

  write(policy("9/day"));
  await until(() => events.length === 1);
  assert.equal(events[0], limiter.policy.version);
  assert.equal(limiter.checkSync({ user: "alice" }).remaining, 7);

  write("limits: [{ name: per-user, rate: 5/parsec }]");
  await until(() => events.length === 2);
  assert.match(events[1], /parsec/);
  assert.equal(limiter.checkSync({ user: "alice" }).remaining, 6);
  await limiter.close();
});

test("cluster workers on memory get one warning", () => {
  const two = `${OPEN} new Limiter(${JSON.stringify({ limits })});`;
  const warnings = ({ stderr }) => stderr.split("\n").filter((line) => line.startsWith("tollkeeper:"));
  const warning = (count) => [
    `tollkeeper: each of ${count} processes has its own counters, so together they admit ${count} times the limit: ` +
      `use redis://, or set share: 1/${count}`,
  ];
  assert.deepEqual(warnings(script(two)), []);
  assert.deepEqual(warnings(script(two, { NODE_APP_INSTANCE: "0", instances: "4" })), warning(4));
  const cluster = `
    import cluster from "node:cluster";
    if (cluster.isPrimary) cluster.setupPrimary({ execArgv: [] }), cluster.fork();
    else {
      const { Limiter } = await import("tollkeeper");
      new Limiter(${JSON.stringify({ limits })});
      cluster.worker.disconnect();
    }
  `;
  const file = `${configFile("")}.mjs`;
  writeFileSync(file, cluster.replace('"tollkeeper"', JSON.stringify(import.meta.resolve("tollkeeper"))));
  const ended = spawnSync(process.execPath, [file], { encoding: "utf8", timeout: 60_000 });
  assert.deepEqual(warnings(ended), warning("N"));
});

test("a manual clock moves only by advance()", async () => {
  const limits = [{ name: "a", by: "user", rate: "1/min", algorithm: "fixed-window" }];
  const { limiter, clock } = testing({ limits, at: 0 });
  assert.deepEqual([limiter.checkSync({ user: "a" }).allowed, limiter.checkSync({ user: "a" }).retryAfter], [true, 60]);
  clock.advance(59.5);
  assert.equal(limiter.checkSync({ user: "a" }).retryAfter, 0.5);
  clock.advance(0.5);
  assert.equal(limiter.checkSync({ user: "a" }).allowed, true);
  assert.equal(clock.now, 60);
  assert.throws(() => testing({ limits, store: "redis://127.0.0.1/" }), /memory/);
});

test("waiters are admitted one after the other", async () => {
  const limiter = new Limiter({ limits: [{ name: "a", by: "user", rate: "1/50ms", algorithm: "sliding-log" }] });
  const order = [];
  const waiters = Array.from({ length: 5 }, async (_, at) => {
    const decision = await limiter.untilAllowed({ user: "alice" });
    order.push(at);
    return decision.allowed;
  });
  assert.deepEqual(await Promise.all(waiters), Array(5).fill(true));
  assert.deepEqual(order, [0, 1, 2, 3, 4]);
});

test("a waiter gives up by timeout, signal and never", async () => {
  const limiter = new Limiter({ limits });
  await limiter.check({ user: "alice" }, { cost: 5 });
  const late = await limiter.untilAllowed({ user: "alice" }, { timeout: 10 });
  assert.deepEqual([late.allowed, late.retryAfter > 86000], [false, true]);
  assert.equal((await limiter.untilAllowed({ user: "bob" }, { cost: 6 })).never, true);
  const controller = new AbortController();
  const waiting = thrown(() => limiter.untilAllowed({ user: "alice" }, { signal: controller.signal }));
  const behind = limiter.untilAllowed({ user: "alice" }, { timeout: 10 });
  controller.abort(new Error("left"));
  assert.equal((await waiting).message, "left");
  assert.equal((await behind).allowed, false);
});
