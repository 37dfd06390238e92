// Bad input is an error with a code of the HTTP API, before anything is charged.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Limiter, TollkeeperError } from "tollkeeper";
import { server, thrown } from "./helper.mjs";

const limits = [{ name: "per-user", by: "user", rate: "5/day", algorithm: "sliding-log" }];
const many = Object.fromEntries(Array.from({ length: 65 }, (_, at) => [`f${at}`, 1]));
class Session {
  user = "alice";
}

/** Facts, options, code and where. */
const BAD = [
  [undefined, {}, "invalid_fact", "facts"],
  [null, {}, "invalid_fact", "facts"],
  ["user", {}, "invalid_fact", "facts"],
  [[["user", "alice"]], {}, "invalid_fact", "facts"],
  [new Map([["user", "alice"]]), {}, "invalid_fact", "facts"],
  [new Session(), {}, "invalid_fact", "facts"],
  [{ user: null }, {}, "invalid_fact", "facts.user"],
  [{ user: NaN }, {}, "invalid_fact", "facts.user"],
  [{ user: Infinity }, {}, "invalid_fact", "facts.user"],
  [{ user: 1.5 }, {}, "invalid_fact", "facts.user"],
  [{ user: 2 ** 53 }, {}, "invalid_fact", "facts.user"],
  [{ user: {} }, {}, "invalid_fact", "facts.user"],
  [{ user: ["alice"] }, {}, "invalid_fact", "facts.user"],
  [{ user: new Date(0) }, {}, "invalid_fact", "facts.user"],
  [{ user: { toJSON: () => "alice" } }, {}, "invalid_fact", "facts.user"],
  [{ user: { sha256: "short" } }, {}, "invalid_fact", "facts.user"],
  [{ user: () => "alice" }, {}, "invalid_fact", "facts.user"],
  [{ user: Symbol("alice") }, {}, "invalid_fact", "facts.user"],
  [{ user: "\ud800" }, {}, "invalid_fact", "facts.user"],
  [{ user: "a".repeat(1025) }, {}, "invalid_fact", "facts.user"],
  [{ user: "a".repeat(2 ** 21) }, {}, "invalid_fact", "facts.user"],
  [{ user: "é".repeat(600) }, {}, "invalid_fact", "facts.user"],
  [{ "a b": 1 }, {}, "invalid_fact", "facts.a b"],
  [{ ip: "nowhere" }, {}, "invalid_fact", "facts.ip"],
  [many, {}, "too_many", "facts"],
  [{ user: "alice" }, { cost: 0 }, "invalid_cost", "cost"],
  [{ user: "alice" }, { cost: -1 }, "invalid_cost", "cost"],
  [{ user: "alice" }, { cost: NaN }, "invalid_cost", "cost"],
  [{ user: "alice" }, { cost: 0.5 }, "invalid_cost", "cost"],
  [{ user: "alice" }, { cost: 2 ** 53 }, "invalid_cost", "cost"],
  [{ user: "alice" }, { cost: 2 ** 31 + 1 }, "invalid_cost", "cost"],
  [{ user: "alice" }, { cost: 10n ** 30n }, "invalid_cost", "cost"],
  [{ user: "alice" }, { cost: "1" }, "invalid_cost", "cost"],
  [{ user: "alice" }, { cost: null }, "invalid_cost", "cost"],
  [{ user: "alice" }, { cost: Symbol("1") }, "invalid_cost", "cost"],
  [{ user: "alice" }, { costs: 1 }, "unknown_field", "costs"],
  [{ user: "alice" }, 2, "unknown_field", null],
];

test("bad input is refused with code and place, uncharged", async () => {
  const { http } = await server(`limits: ${JSON.stringify(limits)}`);
  for (const options of [{ limits }, { server: http, timeout: 60_000 }]) {
    const limiter = new Limiter(options);
    for (const [facts, choices, code, where] of BAD) {
      const calls = [() => limiter.check(facts, choices)];
      if (options.limits) calls.push(async () => limiter.checkSync(facts, choices));
      for (const call of calls) {
        const error = await thrown(call);
        assert.deepEqual([error.constructor, error.code, error.where], [TollkeeperError, code, where]);
        assert.ok(error.message.length < 300 && !("status" in error), error.message);
      }
    }
    assert.equal((await limiter.check({ user: "alice" })).remaining, 4);
  }
});

test("unusual values are counted like their text", async () => {
  const limiter = new Limiter({ limits });
  const remaining = async (user) => (await limiter.check({ user })).remaining;
  assert.deepEqual([await remaining(7), await remaining("7"), await remaining(7n)], [4, 3, 2]);
  assert.deepEqual([await remaining(true), await remaining("true")], [4, 3]);
  assert.deepEqual([await remaining(-0), await remaining(0)], [4, 3]);
  assert.deepEqual([await remaining('"\\\n\u0000é😀'), await remaining('"\\\n\u0000é😀')], [4, 3]);
  const { limits: applied } = await limiter.check({ user: undefined });
  assert.deepEqual(applied, [], "undefined counts as absent");
  const hostile = JSON.parse('{"__proto__":"x","user":"alice","constructor":"y"}');
  assert.equal((await limiter.check(hostile)).remaining, 4);
  assert.equal((await limiter.check(Object.assign(Object.create(null), { user: "bob" }))).remaining, 4);
});

test("bad calls of other methods are errors", async () => {
  const slots = { name: "exports", by: "user", algorithm: "concurrency", limit: 1 };
  const limiter = new Limiter({ limits: [...limits, slots] });
  for (const [call, code] of [
    [() => limiter.refund(undefined), "invalid_json"],
    [() => limiter.settle(null), "invalid_json"],
    [() => limiter.refund("nonsense"), "unknown_charge"],
    [() => limiter.settle("nonsense", { cost: 1 }), "unknown_charge"],
    [() => limiter.reserve({ user: "alice" }, { ttl: "1 mn" }), "invalid_ttl"],
    [() => limiter.forget("no-such-limit", { user: "alice" }), "unknown_limit"],
  ]) {
    assert.equal((await thrown(call)).code, code);
  }
  for (const timeout of ["5s", NaN, -1, null]) {
    const error = await thrown(() => limiter.untilAllowed({ user: "alice" }, { timeout }));
    assert.match(error.message, /is not a number of milliseconds/);
  }
  const invalid = { name: "TollkeeperError", code: "invalid_config" };
  for (const options of [
    { limits: [{ name: "a", rate: "5/parsec" }] },
    { limits: [{ name: "a" }] },
    { limits: [], colour: "red" },
  ]) {
    assert.throws(() => new Limiter(options), invalid, JSON.stringify(options));
  }
  assert.throws(() => new Limiter({ config: "/nonexistent/tollkeeper.yaml" }), /nonexistent/);
  assert.throws(() => new Limiter({ limits: [], name: 7 }));
});
