// Starts real servers, Redis and Chromium for the browser tests.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { createHash } from "node:crypto";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";

const require = createRequire(join(process.env.BROWSER_MODULES, "package.json"));
export const { chromium } = require("playwright-core");
const axe = require("axe-core").source;
export const SCREENSHOTS = process.env.SCREENSHOTS;
mkdirSync(SCREENSHOTS, { recursive: true });

export const TOKEN = "boss";
export const ADMIN = `admin: { token_sha256: ${createHash("sha256").update(TOKEN).digest("hex")} }\n`;

const cleanups = [];
export const folder = mkdtempSync(join(tmpdir(), "tollkeeper-browser-"));
cleanups.push(() => rmSync(folder, { recursive: true, force: true }));

/** Runs the test, and ends everything that it started. */
export async function run(test) {
  let failed = false;
  try {
    await test();
  } catch (error) {
    failed = true;
    console.error(error);
  }
  for (const cleanup of cleanups.reverse()) await cleanup();
  process.exit(failed ? 1 : 0);
}

export async function freePort() {
  const listener = createServer().listen(0, "127.0.0.1");
  await new Promise((resolve) => listener.once("listening", resolve));
  const { port } = listener.address();
  await new Promise((resolve) => listener.close(resolve));
  return port;
}

/** A process whose output is kept. */
function start(command, args) {
  const child = spawn(command, args, { env: { PATH: process.env.PATH, TOLLKEEPER_GRPC: "off", TOLLKEEPER_RESP: "off" } });
  const process_ = { child, out: "", ended: new Promise((resolve) => child.once("exit", resolve)) };
  for (const stream of [child.stdout, child.stderr]) stream.on("data", (text) => (process_.out += text));
  cleanups.push(async () => {
    child.kill("SIGKILL");
    await process_.ended;
  });
  return process_;
}

/** A server on a free port with this config, or with `upstream` a proxy in front of that URL. */
export class Server {
  static async with(yaml, args = [], upstream = null) {
    const server = new Server();
    server.upstream = upstream;
    server.file = join(folder, `tollkeeper-${Math.random().toString(36).slice(2)}.yaml`);
    writeFileSync(server.file, yaml);
    server.port = await freePort();
    server.args = args;
    await server.start();
    return server;
  }

  async start() {
    const command = this.upstream ? ["proxy", this.upstream, "--listen", `127.0.0.1:${(this.proxyPort ??= await freePort())}`] : ["serve"];
    this.process = start(process.env.TOLLKEEPER, [...command, "--config", this.file, "--http", `127.0.0.1:${this.port}`, ...this.args]);
    this.url = `http://127.0.0.1:${this.port}`;
    await eventually("the server listens", () => this.process.out.includes("listening http="));
  }

  async kill() {
    this.process.child.kill("SIGKILL");
    await this.process.ended;
  }

  change(yaml) {
    writeFileSync(this.file, yaml);
  }

  async call(method, path, body, headers = {}) {
    const response = await fetch(this.url + path, { method, body: body && JSON.stringify(body), headers: { authorization: `Bearer ${TOKEN}`, ...headers } });
    const text = await response.text();
    return { status: response.status, text, data: text.startsWith("{") ? JSON.parse(text) : null };
  }

  async check(facts, times = 1) {
    let last;
    for (let turn = 0; turn < times; turn++) last = await this.call("POST", "/v1/check", { facts });
    return last.data;
  }

  /** The value of a line of /metrics. */
  async metric(name) {
    const { text } = await this.call("GET", "/metrics");
    const lines = text.split("\n").filter((line) => line.startsWith(name));
    return lines.reduce((sum, line) => sum + Number(line.slice(line.lastIndexOf(" ") + 1)), 0);
  }
}

export class Redis {
  static async start() {
    const redis = new Redis();
    redis.port = await freePort();
    await redis.start();
    return redis;
  }

  async start() {
    this.process = start("redis-server", ["--port", String(this.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", folder]);
    await eventually("Redis listens", () => this.process.out.includes("Ready to accept"));
  }

  async stop() {
    this.process.child.kill("SIGKILL");
    await this.process.ended;
  }
}

/** Debian's Chromium; `options` are those of a context. */
export async function browser(options = {}, args = []) {
  const started = await chromium.launch({ executablePath: process.env.CHROMIUM, args: ["--no-sandbox", "--disable-dev-shm-usage", ...args] });
  cleanups.push(() => started.close());
  const context = await started.newContext({ viewport: { width: 1280, height: 900 }, timezoneId: "UTC", locale: "en-GB", ...options });
  context.setDefaultTimeout(60000);
  // `DASHBOARD=src/dashboard` shows edited files without a new build of the server.
  if (process.env.DASHBOARD) {
    await context.route("**/dashboard/*", (route) => route.fulfill({ path: join(process.env.DASHBOARD, new URL(route.request().url()).pathname.split("/").pop()) }));
  }
  return context;
}

/** A page that keeps its console, its errors and its requests. */
export async function open(context, url) {
  const page = await context.newPage();
  page.log = [];
  page.requests = [];
  page.on("console", (message) => page.log.push(`${message.type()}: ${message.text()}`));
  page.on("pageerror", (error) => page.log.push(`error: ${error.stack}`));
  page.on("request", (request) => page.requests.push(request.url()));
  if (url) await page.goto(url);
  return page;
}

/** Signs in with the token. */
export async function signIn(page, token = TOKEN, stay = false) {
  await page.fill("#token", token);
  if (stay) await page.check("#stay");
  await page.click("#sign-in button");
}

/** Opens a view by its hash. */
export async function view(page, hash) {
  await page.evaluate((to) => (location.hash = to), hash);
}

export async function eventually(what, test, patience = 20000) {
  const began = Date.now();
  for (;;) {
    const found = await test();
    if (found) return found;
    assert.ok(Date.now() - began < patience, `not in time: ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

/** What axe finds in a page, and whether it is wider than the window. Its context needs `bypassCSP`. */
export async function problems(page) {
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  const found = violations.map((it) => `${it.id}: ${it.help}: ${it.nodes.map((node) => node.html).slice(0, 3).join(" ")} ${it.nodes[0].failureSummary}`);
  const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  return wide > 0 ? [...found, `${wide} pixels too wide`] : found;
}

/** The options of a context for each mode in which a view is looked at. */
export const MODES = [["light", { colorScheme: "light" }], ["dark", { colorScheme: "dark" }], ["narrow", { colorScheme: "light", viewport: { width: 360, height: 740 } }],
  // As a window of 1280 x 900 pixels at 200 %.
  ["zoomed", { colorScheme: "light", viewport: { width: 640, height: 450 }, deviceScaleFactor: 2 }]];

/** The console has nothing but the browser's own note of the 401 that asks for the token. */
export function quiet(page) {
  const own = (line) => line.includes("401 (Unauthorized)");
  assert.deepEqual(page.log.filter((line) => !own(line)), []);
}
