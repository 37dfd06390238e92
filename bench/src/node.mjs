// Measures the Node package next to its peers, in rounds that alternate between them.
//
//     node node.mjs RESULTS [memory|redis|expressRequests]
//
// Prints figures, ratios (theirs divided by ours: above 1, ours is faster) and goals, and saves every round.

import { fork, spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { connect, createServer } from "node:net";
import { availableParallelism, cpus, release, tmpdir } from "node:os";
import { join } from "node:path";
import express from "express";
import { rateLimit } from "express-rate-limit";
import Redis from "ioredis";
import { RateLimiterMemory, RateLimiterRedis } from "rate-limiter-flexible";
import { Limiter } from "tollkeeper";
import { tollkeeper } from "tollkeeper/express";

const ROUNDS = 5;
const MANY = 1e9;
const saved = {};

const median = (values) => [...values].sort((a, b) => a - b)[values.length >> 1];
const rounded = (value) => value.toFixed(Math.abs(value) < 10 ? 2 : 1);
const figure = (name, value) => console.log(`figure ${name} ${rounded(value)}`);
const ratio = (name, value) => console.log(`ratio ${name} ${value.toFixed(2)}`);
const goal = (name, want, met, got) => {
  console.log(`goal ${name} want${want} got ${got.toFixed(2)} ${met ? "ok" : "MISSED"}`);
};

/** Runs every side once per round; returns the median of each. */
async function rounds(name, sides) {
  const measured = Object.fromEntries(Object.keys(sides).map((side) => [side, []]));
  for (let round = 0; round < ROUNDS; round++) {
    for (const [side, run] of Object.entries(sides)) measured[side].push(await run());
  }
  saved[name] = measured;
  return Object.fromEntries(Object.entries(measured).map(([side, values]) => [side, median(values)]));
}

/** Nanoseconds of CPU time per call. */
async function cpuPerCall(calls, call) {
  const before = process.cpuUsage();
  await call(calls);
  const { user, system } = process.cpuUsage(before);
  return ((user + system) * 1000) / calls;
}

async function memory() {
  const limits = [{ name: "per-user", by: "user", rate: `${MANY}/min`, algorithm: "fixed-window" }];
  const ours = new Limiter({ limits });
  const theirs = new RateLimiterMemory({ points: MANY, duration: 60 });
  const none = new Limiter({ limits: [{ ...limits[0], rate: "1/day" }] });
  const theirNone = new RateLimiterMemory({ points: 1, duration: 86400 });
  none.checkSync({ user: "alice" });
  await theirNone.consume("alice");
  const awaited = (check) => async (calls) => {
    for (let call = 0; call < calls; call++) await check();
  };
  const repeated = (check) => (calls) => {
    for (let call = 0; call < calls; call++) check();
  };
  const sides = {
    "check-allowed": () => cpuPerCall(50_000, awaited(() => ours.check({ user: "alice" }))),
    "checksync-allowed": () => cpuPerCall(50_000, repeated(() => ours.checkSync({ user: "alice" }))),
    "flexible-allowed": () => cpuPerCall(50_000, awaited(() => theirs.consume("alice"))),
    "check-refused": () => cpuPerCall(50_000, awaited(() => none.check({ user: "alice" }))),
    "flexible-refused": () => cpuPerCall(50_000, awaited(() => theirNone.consume("alice").catch((refusal) => refusal))),
  };
  const got = await rounds("memory-ns", sides);
  for (const [side, value] of Object.entries(got)) figure(`node-memory-${side}-cpu-ns`, value);
  for (const outcome of ["allowed", "refused"]) {
    const value = got[`flexible-${outcome}`] / got[`check-${outcome}`];
    ratio(`node-memory-${outcome}/rate-limiter-flexible`, value);
    const note = "their map in JavaScript is faster, ours crosses into native code";
    if (value < 1) console.log(`note node-memory-${outcome}: ${note}`);
  }
}

async function redis() {
  const folder = mkdtempSync(join(tmpdir(), "tollkeeper-bench-"));
  const listener = createServer().listen(0, "127.0.0.1");
  await once(listener, "listening");
  const { port } = listener.address();
  listener.close();
  const args = ["--port", port, "--save", "", "--appendonly", "no", "--dir", folder];
  const server = spawn("redis-server", args, { stdio: "ignore" });
  const client = new Redis(port, "127.0.0.1", { maxRetriesPerRequest: null });
  await client.ping();
  const limit = (name, by) => ({ name, by, rate: `${MANY}/min`, algorithm: "fixed-window" });
  const settings = { store: `redis://127.0.0.1:${port}/`, redis: { deadline: "5s", denial_bound: false } };
  const open = (limits) => new Limiter({ ...settings, limits });
  const ours = open([limit("a", "user")]);
  const three = open([limit("a", "user"), limit("b", "tenant"), limit("c", "route")]);
  const theirs = new RateLimiterRedis({ storeClient: client, points: MANY, duration: 60 });
  const keys = Array.from({ length: 1000 }, (_, key) => `user ${key}`);
  /** Calls per second, and microseconds of CPU time per call, with so many in flight. */
  const load = async (calls, inFlight, check) => {
    let next = 0;
    const worker = async () => {
      while (next < calls) await check(keys[next++ % keys.length]);
    };
    const began = performance.now();
    const cpu = await cpuPerCall(calls, () => Promise.all(Array.from({ length: inFlight }, worker)));
    return { rate: calls / ((performance.now() - began) / 1000), cpu: cpu / 1000 };
  };
  let last;
  const admitted = (decision) => {
    if (!decision.allowed) throw new Error(`a check was refused: ${decision.reason}`);
    last = decision;
  };
  const sides = {
    ours: (user) => ours.check({ user }).then(admitted),
    "ours-3-limits": (user) => three.check({ user, tenant: user, route: user }).then(admitted),
    flexible: (user) => theirs.consume(user),
  };
  for (const [inFlight, calls] of [[1, 2_000], [64, 30_000]]) {
    for (const check of Object.values(sides)) await load(calls / 4, inFlight, check);
    const measured = Object.fromEntries(Object.keys(sides).map((side) => [side, { rate: [], cpu: [] }]));
    for (let round = 0; round < ROUNDS; round++) {
      for (const [side, check] of Object.entries(sides)) {
        const { rate, cpu } = await load(calls, inFlight, check);
        measured[side].rate.push(rate);
        measured[side].cpu.push(cpu);
        if (last.degraded !== null) throw new Error("Redis did not answer");
      }
    }
    saved[`redis-${inFlight}`] = measured;
    for (const [side, { rate, cpu }] of Object.entries(measured)) {
      figure(`node-redis-${inFlight}-calls-a-second-${side}`, median(rate));
      figure(`node-redis-${inFlight}-cpu-us-${side}`, median(cpu));
    }
    const value = median(measured.ours.rate) / median(measured.flexible.rate);
    ratio(`node-redis-${inFlight}/rate-limiter-flexible`, value);
    if (inFlight === 64) goal("node-redis-64/rate-limiter-flexible", ">=1.0", value >= 1, value);
  }
  client.disconnect();
  server.kill();
  await once(server, "exit");
  rmSync(folder, { recursive: true });
}

/** The Express application of a child process; it answers messages with its CPU time. */
function serveExpress() {
  const hello = (request, response) => response.end("hello");
  const limits = [{ name: "per-ip", by: "ip", rate: `${MANY}/min`, algorithm: "fixed-window" }];
  const app = express();
  app.disable("x-powered-by");
  app.disable("etag");
  app.get("/bare", hello);
  const theirs = rateLimit({ windowMs: 60_000, limit: MANY, standardHeaders: "draft-8", legacyHeaders: true });
  app.get("/theirs", theirs, hello);
  app.get("/ours", tollkeeper(new Limiter({ limits })), hello);
  const server = app.listen(0, "127.0.0.1", () => process.send(server.address().port));
  process.on("message", () => process.send(process.cpuUsage()));
  process.on("disconnect", () => process.exit());
}

async function expressRequests() {
  const child = fork(process.argv[1], ["serve"]);
  const [port] = await once(child, "message");
  const cpu = async () => {
    child.send("cpu");
    const [{ user, system }] = await once(child, "message");
    return user + system;
  };
  const request = (path) => `GET ${path} HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: bench\r\nAccept: */*\r\n\r\n`;
  /** Sends requests over 8 connections, each after the response to the last one. */
  const send = async (path, requests) => {
    let left = requests;
    const connections = Array.from({ length: 8 }, async () => {
      const socket = connect(port, "127.0.0.1");
      socket.setNoDelay().setEncoding("latin1");
      await once(socket, "connect");
      let answer = "";
      const done = new Promise((resolve, reject) => {
        socket.on("data", (text) => {
          answer += text;
          if (!answer.endsWith("hello")) return;
          if (!answer.startsWith("HTTP/1.1 200")) reject(new Error(answer));
          answer = "";
          if (left-- > 0) socket.write(request(path));
          else resolve(socket.end());
        });
      });
      left -= 1;
      socket.write(request(path));
      await done;
    });
    await Promise.all(connections);
  };
  const side = (path) => async () => {
    const before = await cpu();
    await send(path, 5_000);
    return ((await cpu()) - before) / 5_000;
  };
  const sides = { bare: side("/bare"), "express-rate-limit": side("/theirs"), ours: side("/ours") };
  for (const run of Object.values(sides)) await run();
  const got = await rounds("express", sides);
  for (const [name, value] of Object.entries(got)) figure(`node-express-cpu-us-${name}`, value);
  const value = got.ours / got["express-rate-limit"];
  goal("node-express-request/express-rate-limit", "<=1.1", value <= 1.1, value);
  child.disconnect();
}

const [file, only] = process.argv.slice(2);
if (file === "serve") {
  serveExpress();
} else {
  for (const part of [memory, redis, expressRequests]) if (only === undefined || part.name === only) await part();
  let results = {};
  try {
    results = JSON.parse(readFileSync(file, "utf8"));
  } catch {
    // The first benchmark of a run starts the file.
  }
  // Saved like the parts of the other benchmarks: one that is measured on another machine names it.
  const here = { cores: availableParallelism(), cpu: cpus()[0]?.model ?? "unknown", kernel: release() };
  results.machine ??= here;
  const { node: _before, ...others } = results.other_machines ?? {};
  const isHere = Object.keys(here).every((name) => here[name] === results.machine[name]);
  results.other_machines = isHere ? others : { ...others, node: here };
  writeFileSync(file, `${JSON.stringify({ ...results, node: saved }, null, 2)}\n`);
}
