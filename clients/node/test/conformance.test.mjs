// Every step of clients/conformance gives equal bytes through the addon, and equal fields from a server, but for times.

import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { test } from "node:test";
import { server } from "./helper.mjs";

const folder = process.env.CONFORMANCE;
const files = readdirSync(folder).filter((name) => name.endsWith(".json"));
const CALLS = ["check", "peek", "usage", "reserve", "settle", "refund", "acquire", "release", "renew", "forget", "limits", "explain"];
const addon = createRequire(import.meta.url)(fileURLToPath(new URL("tollkeeper.node", import.meta.resolve("tollkeeper"))));
addon.connect(() => {});

/** Runs the steps of a file with `ask(call, text)`, and compares what `shown` leaves of the answers. */
async function run({ steps }, ask, advance, shown) {
  const saved = new Map();
  for (const step of steps) {
    if (step.advance !== undefined) {
      if (!advance) return;
      advance(step.advance);
    }
    if (step.call === undefined) continue;
    const text = step.in.replace(/"\$(\w+)"/g, (_, name) => JSON.stringify(saved.get(name)));
    let answer = await ask(step.call, text);
    for (const field of ["charge", "slot"]) {
      answer = answer.replace(new RegExp(`"${field}":"([^"]*)"`), (_, value) => {
        const name = step.save?.[field] ?? field;
        saved.set(name, value);
        return `"${field}":"$${name}"`;
      });
    }
    assert.deepEqual(shown(answer), shown(step.out), `${step.call} ${text}`);
  }
}

test("the addon answers byte for byte", async () => {
  for (const name of files) {
    const file = JSON.parse(readFileSync(join(folder, name), "utf8"));
    const engine = addon.open(false, JSON.stringify(file.config), null, null, file.at, 0);
    await run(
      file,
      (call, text) => addon.ask(engine, 1, CALLS.indexOf(call), text, false),
      (seconds) => addon.advance(engine, seconds),
      (text) => text,
    );
    addon.close(engine);
  }
  assert.ok(files.length >= 5);
});

const untimed = (text) => JSON.parse(text, (name, value) => (/^(retry_after|reset_after|delay|reason|loaded_at|source)$/.test(name) ? undefined : value));

test("a server answers the same fields", async () => {
  const token = "conformance";
  const token_sha256 = (await import("node:crypto")).createHash("sha256").update(token).digest("hex");
  for (const name of files.filter((name) => name !== "errors-in-process.json")) {
    const file = JSON.parse(readFileSync(join(folder, name), "utf8"));
    const { http, child } = await server(JSON.stringify({ ...file.config, admin: { token_sha256 } }));
    const ask = async (call, text) => {
      const options = { headers: { authorization: `Bearer ${token}` } };
      const { limit, facts } = call === "usage" || call === "forget" ? JSON.parse(text) : {};
      const query = new URLSearchParams({ ...(limit === undefined ? {} : { limit }), ...facts });
      const [method, path, body] =
        call === "usage" ? ["GET", `usage?${query}`] : call === "forget" ? ["DELETE", `state?${query}`] : call === "limits" ? ["GET", "limits"] : ["POST", call, text];
      return (await fetch(`${http}/v1/${path}`, { ...options, method, body })).text();
    };
    await run(file, ask, null, untimed);
    child.kill();
  }
});
