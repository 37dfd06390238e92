// `next build` and `next start` with route handlers behind `withLimits`.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdirSync, symlinkSync, writeFileSync } from "node:fs";
import { Agent } from "node:http";
import { join } from "node:path";
import { test } from "node:test";
import { DIALECTS, POLICY } from "./apps.mjs";
import { firstChunk, folder, freePort, start, statusOf, until } from "./helper.mjs";

const HEAD = `
  import { Limiter } from "tollkeeper";
  import { withLimits } from "tollkeeper/fetch";

  // \`next start\` sets this header from the connection, unless a proxy did.
  const ip = (request) => request.headers.get("x-forwarded-for") ?? undefined;
  const policy = ${JSON.stringify(POLICY)};
  export const dynamic = "force-dynamic";
`;

const FILES = {
  "package.json": JSON.stringify({ private: true, type: "module" }),
  "next.config.mjs": `export default { serverExternalPackages: ["tollkeeper"] };`,
  "app/layout.js": `export default function Layout({ children }) { return <html><body>{children}</body></html>; }`,
  // One limiter for each dialect of headers: /hello/ietf.
  "app/hello/[dialect]/route.js": `${HEAD}
    const hello = async (request, { params }) => Response.json({ hello: (await params).dialect });
    const limits = [{ name: "per-ip", by: "ip", rate: "5/day", algorithm: "sliding-log" }];
    const limited = (dialect) => withLimits(new Limiter({ headers: [dialect], limits }), hello, { ip });
    const handlers = Object.fromEntries(${JSON.stringify(Object.keys(DIALECTS))}.map((name) => [name, limited(name)]));

    export const GET = async (request, context) => handlers[(await context.params).dialect](request, context);
  `,
  "app/burst/route.js": `${HEAD}
    const limits = [{ name: "per-ip", by: "ip", rate: "5/day", algorithm: "sliding-log" }];
    export const GET = withLimits(new Limiter({ limits }), () => new Response("hello"), { ip });
  `,
  "app/login/route.js": `${HEAD}
    export const POST = withLimits(new Limiter(policy), async (request) => {
      const { password } = await request.json();
      return new Response(null, { status: password === "right" ? 200 : 401 });
    }, { ip });
  `,
  "app/stream/route.js": `${HEAD}
    export const GET = withLimits(new Limiter(policy), () => {
      const start = (controller) => controller.enqueue(new TextEncoder().encode("first\\n"));
      return new Response(new ReadableStream({ start }));
    }, { ip });
  `,
};

/** Builds and starts the application; returns its URL. */
async function started() {
  const app = folder();
  for (const [name, text] of Object.entries(FILES)) {
    mkdirSync(join(app, name, ".."), { recursive: true });
    writeFileSync(join(app, name), text);
  }
  symlinkSync(join(process.cwd(), "node_modules"), join(app, "node_modules"));
  const next = join(process.cwd(), "node_modules/next/dist/bin/next");
  const env = { ...process.env, NEXT_TELEMETRY_DISABLED: "1", NODE_ENV: "production" };
  execFileSync(process.execPath, [next, "build", "--webpack"], { cwd: app, env, stdio: "pipe" });
  const port = await freePort();
  const stdio = ["ignore", "ignore", "inherit"];
  start(process.execPath, [next, "start", "--port", String(port), "--hostname", "127.0.0.1"], { cwd: app, env, stdio });
  const url = `http://127.0.0.1:${port}`;
  await until(() => fetch(`${url}/none`).then((answer) => answer.status === 404, () => false));
  return url;
}

const url = await started();

test("five requests pass and the sixth is refused", async () => {
  for (const [dialect, names] of Object.entries(DIALECTS)) {
    for (let request = 0; request < 5; request++) {
      const answer = await fetch(`${url}/hello/${dialect}`);
      assert.deepEqual([answer.status, await answer.json()], [200, { hello: dialect }]);
      for (const name of names) assert.ok(answer.headers.has(name), `${dialect}: ${name}`);
    }
    const refused = await fetch(`${url}/hello/${dialect}`);
    for (const name of [...names, "retry-after"]) assert.ok(refused.headers.has(name), `${dialect}: ${name}`);
    assert.deepEqual([refused.status, (await refused.json())["violated-policies"]], [429, ["per-ip"]]);
  }
});

test("of 100 connections exactly 5 are admitted", async () => {
  const agent = new Agent({ maxSockets: Infinity });
  const statuses = await Promise.all(Array.from({ length: 100 }, () => statusOf(`${url}/burst`, agent)));
  agent.destroy();
  assert.equal(statuses.filter((status) => status === 200).length, 5);
  assert.equal(statuses.filter((status) => status === 429).length, 95);
});

test("only failed logins count", async () => {
  const login = async (password) => {
    const body = JSON.stringify({ email: "alice@example.test", password });
    const headers = { "content-type": "application/json" };
    return (await fetch(`${url}/login`, { method: "POST", body, headers })).status;
  };
  for (let attempt = 0; attempt < 10; attempt++) assert.equal(await login("right"), 200);
  for (let attempt = 0; attempt < 5; attempt++) assert.equal(await login("wrong"), 401);
  assert.equal(await login("right"), 429);
});

test("slot is held while a body streams", async () => {
  const first = await firstChunk(`${url}/stream`);
  assert.equal((await fetch(`${url}/stream`)).status, 429);
  first.destroy();
  let second;
  await until(async () => (second = await firstChunk(`${url}/stream`)) !== null);
  second.destroy();
});
