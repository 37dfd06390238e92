// One class for limits in this process (memory or Redis) and for limits of a server.

import { TollkeeperError } from "./lib/error.js";
import { Decision, limitState } from "./lib/decision.js";
import { bodyOf, costOf, onlyOptions, pairsOf } from "./lib/request.js";
import { Engine } from "./lib/engine.js";
import { Remote } from "./lib/remote.js";
import { ENTER, UNREAD, arrivalOf, enter, ownOf, parsedBody, visitEngine, visitServer } from "./lib/visit.js";
import { MAX_TIMER_MS } from "./lib/timer.js";

export { Decision, TollkeeperError };

export class Limiter {
  #backend;
  #isEngine;
  #isClosed = false;
  #listeners = { reload: new Set(), error: new Set() };
  #reportedAt = -Infinity;
  #queues = new Map();

  /**
   * @param {object} options `{ config }`, `{ limits }` or `{ server }`
   * @param {{ at: number, opened: (engine: Engine) => void }} [manual] a manual clock, for `tollkeeper/testing`
   */
  constructor(options, manual) {
    const ways = ["config", "limits", "server"].filter((way) => options?.[way] !== undefined);
    if (ways.length !== 1) {
      throw new TypeError(
        'a Limiter takes exactly one of { config: "tollkeeper.yaml" }, { limits: […] } and { server: "http://…" }',
      );
    }
    this.#isEngine = options.server === undefined;
    if (this.#isEngine) {
      const listener = (kind, message) => {
        if (kind === "reload") this.#emit("reload", Number(message));
        else this.#emitError(new Error(message));
      };
      this.#backend = new Engine(options, listener, manual?.at);
      manual?.opened(this.#backend);
      if (!this.#backend.isRemote && manual === undefined) warnOfProcesses();
    } else {
      this.#backend = new Remote(options, (error) => this.reportError(error));
    }
  }

  /** Decides and charges. */
  check(facts, options) {
    // Not an async function, which would take three more turns of the microtask queue.
    try {
      return Promise.resolve(this.#decide("check", facts, options, CHECK_OPTIONS));
    } catch (error) {
      return Promise.reject(error);
    }
  }

  /** Like `check`, without a promise. Only on a memory store in this process. */
  checkSync(facts, options) {
    if (!this.#isEngine || this.#backend.isRemote) {
      throw new TypeError("checkSync works only with `config` or `limits` on memory://: await check() instead");
    }
    return this.#decide("check", facts, options, ["cost"]);
  }

  /** What `check` would say. Charges nothing. */
  async peek(facts, options) {
    return this.#decide("peek", facts, options, CHECK_OPTIONS);
  }

  /** Charges an estimate, which `settle` corrects within `ttl`: "60s". */
  async reserve(facts, options) {
    return this.#decide("reserve", facts, options, ["cost", "ttl", "signal"]);
  }

  /** Takes a slot of every concurrency limit that applies, and charges the other limits. */
  async acquire(facts, options) {
    const decision = await this.#decide("acquire", facts, options, CHECK_OPTIONS);
    const { slot } = decision.toJSON();
    if (slot == null) return { decision, slot: null };
    const ask = (verb, text) => this.#done(verb, { text });
    return { decision, slot: new Slot(slot, ask, (error) => this.reportError(error)) };
  }

  /** The state of each limit that applies, for a request of cost 1. Charges nothing. */
  async usage(facts, options) {
    const { signal } = onlyOptions(options, ["signal"]);
    return this.#ask("usage", { pairs: pairsOf(facts) }, signal, limitStates);
  }

  /** Which limits apply, and why. Decides nothing. */
  async explain(facts, options) {
    const { signal } = onlyOptions(options, ["signal"]);
    return this.#ask("explain", { pairs: pairsOf(facts) }, signal, limitStates);
  }

  /** Corrects a charge to the actual cost, or to the actual facts of `cost:` limits. */
  async settle(charge, options) {
    return this.#correct("settle", charge, options);
  }

  /** Gives a charge back, or the part of it that `cost` or `facts` say. */
  async refund(charge, options) {
    return this.#correct("refund", charge, options);
  }

  /** Forgets what a key of a limit has used. */
  async forget(limit, facts) {
    return this.#done("forget", { limit: String(limit), pairs: pairsOf(facts) });
  }

  /**
   * Waits until the request is admitted. Requests with equal facts wait in line, and only the first one asks.
   * Returns the last refusal if `timeout` milliseconds pass, or if waiting does not help.
   */
  async untilAllowed(facts, options) {
    const { cost, timeout = Infinity, signal } = onlyOptions(options, ["cost", "timeout", "signal"]);
    if (!(typeof timeout === "number" && timeout >= 0)) {
      throw new TypeError(`timeout ${timeout} is not a number of milliseconds, such as 200`);
    }
    const key = bodyOf(pairsOf(facts));
    const deadline = performance.now() + timeout;
    const before = this.#queues.get(key);
    const turn = withResolvers();
    this.#queues.set(key, turn.promise);
    try {
      if (before !== undefined) await elapsed(deadline, signal, before);
      for (;;) {
        const decision = await this.check(facts, { cost, signal });
        const wait = decision.retryAfter === null ? null : decision.retryAfter * 1000;
        if (decision.allowed || wait === null || performance.now() + wait > deadline) return decision;
        await elapsed(performance.now() + wait, signal);
      }
    } finally {
      if (this.#queues.get(key) === turn.promise) this.#queues.delete(key);
      // The next one waits for this one's predecessor, too, if this one gave up early.
      turn.resolve(before);
    }
  }

  /**
   * Decides a request of Node's `http` by everything that the limits read from it, for use outside a middleware: in
   * `server.on("upgrade")`.
   */
  async visit(request, options = {}) {
    const { facts, cost } = onlyOptions(options, ["facts", "cost"]);
    const visit = await enter(this, { facts, cost, onRefused: ignored }, request, arrivalOf(request));
    if (visit.needsBody === null) return visit;
    const body = parsedBody(request, request.body);
    if (body.kind === UNREAD) throw new Error(`${visit.needsBody}: set request.body before visit()`);
    return visit.withBody(body);
  }

  /** The active limits, with the version and the source of the policy. */
  get policy() {
    if (!this.#isEngine) throw new TypeError("the policy is on the server: GET /v1/limits shows it");
    if (this.#isClosed) throw closed();
    const { version, source, limits } = this.#backend.policy();
    return { version, source, limits };
  }

  /** `reload`: the config file has changed. `error`: a problem that no call reports. */
  on(event, listener) {
    this.#listenersOf(event).add(listener);
    return this;
  }

  off(event, listener) {
    this.#listenersOf(event).delete(listener);
    return this;
  }

  /** Ends the limiter. Later calls throw `closed`. */
  async close() {
    if (this.#isClosed) return;
    this.#isClosed = true;
    this.#backend.close();
  }

  async [Symbol.asyncDispose ?? Symbol.for("nodejs.asyncDispose")]() {
    await this.close();
  }

  /** Reports a problem to the `error` listeners, or without any to the console, at most once a second. */
  reportError(error) {
    const now = performance.now();
    if (now - this.#reportedAt < 1000) return;
    this.#reportedAt = now;
    this.#emitError(error);
  }

  #emitError(error) {
    if (this.#listeners.error.size > 0) this.#emit("error", error);
    else console.error(`tollkeeper: ${error.message}`);
  }

  [ENTER](arrival, facts, cost, wantsDecision) {
    if (this.#isClosed) throw closed();
    if (!this.#isEngine) return visitServer(this, arrival, facts, cost, this.#backend.hasSlots);
    const decisionOf = (answer, headers) => new Decision(answer, () => headers);
    return visitEngine(this.#backend, arrival, ownOf(facts, cost), undefined, wantsDecision, decisionOf);
  }

  #decide(verb, facts, options, known) {
    const { cost, ttl, signal } = onlyOptions(options, known);
    return this.#ask(verb, { pairs: pairsOf(facts), cost, ttl }, signal, newDecision);
  }

  #correct(verb, charge, options) {
    const { cost, facts } = onlyOptions(options, ["cost", "facts"]);
    if (typeof charge !== "string") {
      const kind = charge === null ? "null" : typeof charge;
      const message = `\`charge\` must be the \`charge\` of an earlier decision, not ${kind}`;
      throw new TollkeeperError("invalid_json", message, "charge");
    }
    let text = `{"charge":${JSON.stringify(charge)}`;
    if (cost !== undefined) text += `,"cost":${costOf(cost)}`;
    if (facts !== undefined) text += `,${bodyOf(pairsOf(facts)).slice(1, -1)}`;
    return this.#done(verb, { text: text + "}" });
  }

  async #done(verb, request) {
    return this.#ask(verb, request, undefined, (answer) => parsed(answer).done);
  }

  #ask(verb, request, signal, read) {
    if (this.#isClosed) throw closed();
    return this.#backend.ask(verb, request, signal, read);
  }

  #emit(event, value) {
    for (const listener of [...this.#listeners[event]]) listener(value);
  }

  #listenersOf(event) {
    if (!Object.hasOwn(this.#listeners, event)) {
      throw new TypeError(`there is no event ${String(event)}: a Limiter has "reload" and "error"`);
    }
    return this.#listeners[event];
  }
}

/** A slot of a concurrency limit. It ends by itself after the limit's `ttl`. */
export class Slot {
  #id;
  #ask;
  #report;

  constructor(id, ask, report) {
    this.#id = id;
    this.#ask = ask;
    this.#report = report;
  }

  /** Gives the slot back; `false` if it was released or has ended. */
  release() {
    return this.#call("release");
  }

  /** Starts its `ttl` anew; `false` if it was released or has ended. */
  renew() {
    return this.#call("renew");
  }

  async #call(verb) {
    try {
      return await this.#ask(verb, `{"slot":${JSON.stringify(this.#id)}}`);
    } catch (error) {
      if (error.code === "unknown_slot") return false;
      throw error;
    }
  }

  async [Symbol.asyncDispose ?? Symbol.for("nodejs.asyncDispose")]() {
    try {
      await this.release();
    } catch (error) {
      // Work that has succeeded must not fail because of this: the slot ends after its ttl.
      if (!UNAVAILABLE.has(error.code)) throw error;
      this.#report(error);
    }
  }
}

const UNAVAILABLE = new Set(["unavailable", "store_unavailable"]);
const CHECK_OPTIONS = ["cost", "signal"];
const newDecision = (answer, headers) => new Decision(answer, headers);
/** The engine answers with text, a server with what was parsed already. */
const parsed = (answer) => (typeof answer === "string" ? JSON.parse(answer) : answer);
const limitStates = (answer) => parsed(answer).limits.map(limitState);
const ignored = () => {};

function closed() {
  return new TollkeeperError("closed", "the limiter is closed");
}

/** Resolves at a time of `performance.now()`, or earlier with `sooner`; rejects when the signal fires. */
function elapsed(at, signal, sooner) {
  return new Promise((resolve, reject) => {
    signal?.throwIfAborted();
    let timer;
    const end = (settle) => {
      clearTimeout(timer);
      signal?.removeEventListener("abort", cancel);
      settle();
    };
    const cancel = () => end(() => reject(signal.reason));
    const wait = () => {
      const left = at - performance.now();
      if (left > 0) timer = setTimeout(wait, Math.min(Math.ceil(left), MAX_TIMER_MS));
      else end(resolve);
    };
    signal?.addEventListener("abort", cancel, { once: true });
    sooner?.then(() => end(resolve));
    wait();
  });
}

function withResolvers() {
  const turn = {};
  turn.promise = new Promise((resolve) => (turn.resolve = resolve));
  return turn;
}

let hasWarned = false;

/** In a cluster, or under PM2, every process has a memory store of its own, so N processes admit N times the limit. */
function warnOfProcesses() {
  const { NODE_APP_INSTANCE, instances = "N" } = process.env;
  if (hasWarned || (NODE_APP_INSTANCE === undefined && !process.getBuiltinModule("node:cluster").isWorker)) return;
  hasWarned = true;
  const together = `so together they admit ${instances} times the limit`;
  const advice = `use redis://, or set share: 1/${instances}`;
  console.warn(`tollkeeper: each of ${instances} processes has its own counters, ${together}: ${advice}`);
}
