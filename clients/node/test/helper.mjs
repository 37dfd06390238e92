// Starts the real programs that the tests need. All of them end with the test.

import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { createServer, get } from "node:http";
import { createServer as createTcpServer, connect } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { after } from "node:test";

/** The longest that a test waits: the machine may be busy. */
export const PATIENCE_MS = 60_000;

/** A folder that is removed at the end. */
export function folder() {
  const path = mkdtempSync(join(tmpdir(), "tollkeeper-node-"));
  after(() => rmSync(path, { recursive: true, force: true }));
  return path;
}

/** A config file with this text. */
export function configFile(text) {
  const path = join(folder(), "tollkeeper.yaml");
  writeFileSync(path, text);
  return path;
}

/** A process that is killed at the end. */
export function start(command, args, options = {}) {
  const child = spawn(command, args, { stdio: ["ignore", "pipe", "inherit"], ...options });
  after(() => child.kill("SIGKILL"));
  return child;
}

/** Resolves with the rest of the first line of standard output that begins with `prefix`. */
export async function line(child, prefix) {
  for await (const text of createInterface(child.stdout)) if (text.startsWith(prefix)) return text.slice(prefix.length);
  throw new Error(`${child.spawnfile} ended before it printed ${prefix}`);
}

/** A Tollkeeper server: `{ http, resp, child }`. */
export async function server(config, args = []) {
  const child = start(process.env.TOLLKEEPER, [
    ...["serve", "--config", configFile(config), "--http", "127.0.0.1:0", "--grpc", "off", "--resp", "127.0.0.1:0"],
    ...args,
  ]);
  const addresses = {};
  for await (const text of createInterface(child.stdout)) {
    const [, name, address] = /^listening (\w+)=(.*)$/.exec(text);
    addresses[name] = address;
    if (addresses.http && addresses.resp) break;
  }
  child.stdout.resume();
  return { http: `http://${addresses.http}`, resp: `redis://${addresses.resp}`, child };
}

/** A port that was free a moment ago. */
export async function freePort() {
  const listener = createTcpServer().listen(0, "127.0.0.1");
  await once(listener, "listening");
  const { port } = listener.address();
  listener.close();
  await once(listener, "close");
  return port;
}

/** A Redis server: `{ url, child, port }`. */
export async function redis(port) {
  for (;;) {
    const chosen = port ?? (await freePort());
    const args = ["--port", String(chosen), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"];
    const child = start("redis-server", args, { cwd: folder() });
    try {
      await Promise.race([line(child, "").then(() => connected(chosen)), ended(child)]);
      child.stdout.resume();
      return { url: `redis://127.0.0.1:${chosen}/`, child, port: chosen };
    } catch (error) {
      if (port !== undefined) throw error;
    }
  }
}

async function ended(child) {
  await once(child, "exit");
  throw new Error("the process ended");
}

/** Resolves once a port answers a PING of Redis. */
async function connected(port) {
  for (;;) {
    const answered = await new Promise((resolve) => {
      const socket = connect(port, "127.0.0.1", () => socket.write("PING\r\n"));
      socket.on("data", () => resolve(true) ?? socket.destroy());
      socket.on("error", () => resolve(false));
    });
    if (answered) return;
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
}

/** Serves a request listener of Node's `http`; returns its URL. */
export async function served(listener) {
  const server = createServer(listener).listen(0, "127.0.0.1");
  after(() => {
    server.close();
    server.closeAllConnections();
  });
  await once(server, "listening");
  return `http://127.0.0.1:${server.address().port}`;
}

/** A port that accepts connections and never answers. */
export async function silence() {
  const sockets = new Set();
  const listener = createTcpServer((socket) => sockets.add(socket.on("error", () => {}))).listen(0, "127.0.0.1");
  after(() => {
    listener.close();
    for (const socket of sockets) socket.destroy();
  });
  await once(listener, "listening");
  return { port: listener.address().port, sockets };
}

/** Waits until `condition` holds, which something else brings about. */
export async function until(condition) {
  const deadline = Date.now() + PATIENCE_MS;
  while (!(await condition())) {
    if (Date.now() > deadline) throw new Error(`timed out: ${condition}`);
    await new Promise((resolve) => setTimeout(resolve, 5));
  }
}

/** What a call throws. */
export async function thrown(call) {
  try {
    await call();
  } catch (error) {
    return error;
  }
  throw new Error(`${call} throws nothing`);
}

/** A response of which the first chunk has arrived; `null` if it was refused. */
export function firstChunk(url) {
  return new Promise((resolve, reject) => {
    const request = get(url, { agent: false }, (response) => {
      response.once("data", () => resolve(response.statusCode === 200 ? request : null));
    });
    request.on("error", reject);
  });
}

/** The status of a response, over a connection of this agent. */
export function statusOf(url, agent) {
  return new Promise((resolve, reject) => {
    const request = get(url, { agent }, (response) => {
      response.resume();
      response.on("end", () => resolve(response.statusCode));
    });
    request.on("error", reject);
  });
}
