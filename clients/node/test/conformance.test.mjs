// Every step of clients/conformance gives equal bytes through the addon. tests/tests of the server compare its answers.

import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { test } from "node:test";

const folder = process.env.CONFORMANCE;
const files = readdirSync(folder).filter((name) => name.endsWith(".json") && name !== "bypasses.json");
const path = fileURLToPath(new URL("tollkeeper.node", import.meta.resolve("tollkeeper")));
const addon = createRequire(import.meta.url)(path);
addon.connect(() => {});
const CALLS = addon.calls();

/** Runs the steps of a file with `ask(call, text)`, and compares the answers. */
function run({ steps }, ask, advance) {
  const saved = new Map();
  for (const step of steps) {
    if (step.advance !== undefined) advance(step.advance);
    if (step.call === undefined) continue;
    const text = step.in.replace(/"\$(\w+)"/g, (_, name) => JSON.stringify(saved.get(name)));
    let answer = ask(step.call, text);
    for (const field of ["charge", "slot"]) {
      answer = answer.replace(new RegExp(`"${field}":"([^"]*)"`), (_, value) => {
        const name = step.save?.[field] ?? field;
        saved.set(name, value);
        return `"${field}":"$${name}"`;
      });
    }
    assert.equal(answer, step.out, `${step.call} ${text}`);
  }
}

test("the addon answers byte for byte", () => {
  for (const name of files) {
    const file = JSON.parse(readFileSync(join(folder, name), "utf8"));
    const engine = addon.open(false, JSON.stringify(file.config), null, null, file.at, 0);
    run(
      file,
      (call, text) => addon.ask(engine, 1, CALLS.indexOf(call), text, false),
      (seconds) => addon.advance(engine, seconds),
    );
    addon.close(engine);
  }
  assert.ok(files.length >= 5);
});
