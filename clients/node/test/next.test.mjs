// `next build` and `next start` with a route handler behind `withLimits`.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdirSync, symlinkSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { folder, freePort, start, until } from "./helper.mjs";

const FILES = {
  "package.json": JSON.stringify({ private: true, type: "module" }),
  "next.config.mjs": `export default { serverExternalPackages: ["tollkeeper"] };`,
  "app/layout.js": `export default function Layout({ children }) { return <html><body>{children}</body></html>; }`,
  "app/api/hello/[name]/route.js": `
    import { Limiter } from "tollkeeper";
    import { withLimits } from "tollkeeper/fetch";

    const limiter = new Limiter({ limits: [{ name: "per-ip", by: "ip", rate: "5/day", algorithm: "sliding-log" }] });
    // \`next start\` sets this header from the connection, unless a proxy did.
    const ip = (request) => request.headers.get("x-forwarded-for") ?? undefined;

    export const dynamic = "force-dynamic";
    export const GET = withLimits(limiter, async (request, { params }) => Response.json({ hello: (await params).name }), { ip });
  `,
};

test("a route handler is limited", async () => {
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
  start(process.execPath, [next, "start", "--port", String(port), "--hostname", "127.0.0.1"], { cwd: app, env, stdio: ["ignore", "ignore", "inherit"] });
  const url = `http://127.0.0.1:${port}/api/hello/alice`;
  const ready = () => fetch(`http://127.0.0.1:${port}/none`).then((answer) => answer.status === 404, () => false);
  await until(ready);
  for (let request = 0; request < 5; request++) {
    const answer = await fetch(url);
    assert.deepEqual([answer.status, await answer.json()], [200, { hello: "alice" }]);
    assert.match(answer.headers.get("ratelimit"), /^"per-ip"/);
  }
  const refused = await fetch(url);
  assert.deepEqual([refused.status, (await refused.json())["violated-policies"]], [429, ["per-ip"]]);
});
