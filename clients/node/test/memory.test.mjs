// Resident memory stays flat over many checks. CHECKS=10000000 in `make soak`.

import assert from "node:assert/strict";
import { test } from "node:test";
import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";
import { Limiter } from "tollkeeper";

// Without a collection before each reading, the heap of V8 grows and shrinks by more than a leak would add.
setFlagsFromString("--expose-gc");
const gc = runInNewContext("gc");

const CHECKS = Number(process.env.CHECKS ?? 200_000);

test("memory is flat over many checks", async () => {
  const limiter = new Limiter({ limits: [{ name: "per-user", by: "user", rate: "1000/s", burst: 1000 }] });
  const request = { method: "GET", url: "/", rawHeaders: ["host", "a"], socket: { remoteAddress: "192.0.2.7" } };
  const part = async () => {
    for (let check = 0; check < CHECKS / 10; check++) limiter.checkSync({ user: `user ${check % 1000}` });
    for (let visit = 0; visit < CHECKS / 100; visit++) await limiter.visit(request);
    gc();
    return process.memoryUsage.rss();
  };
  // The heap of V8 grows to its working size first.
  for (let warmup = 0; warmup < 4; warmup++) await part();
  const before = await part();
  let after;
  for (let rest = 0; rest < 5; rest++) after = await part();
  assert.ok(after < before * 1.05, `${before} bytes, then ${after}`);
});
