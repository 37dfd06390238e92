// A store for express-rate-limit and hono-rate-limiter, which keep their own middleware.

import { Limiter } from "./index.js";

const NAME = "express-rate-limit";
const MAX_CHARGES = 10_000;

/**
 * A store for express-rate-limit and hono-rate-limiter. Their interface counts first and compares afterwards, and has
 * neither costs nor several limits. tollkeeper/express has both, and charges nothing for refused requests.
 */
export class TollkeeperStore {
  #options;
  #limiter = null;
  #refused = "express-rate-limit has not called init()";
  #limit = 0;
  #windowMs = 0;
  /** Key to charges, the key used last at the end. */
  #charges = new Map();
  #remembered = 0;

  constructor({ store = "memory://", algorithm = "sliding-window", prefix, redis, ...others } = {}) {
    const unknown = Object.keys(others);
    if (unknown.length > 0) {
      const known = "store, algorithm, prefix and redis";
      throw new TypeError(`unknown option \`${unknown[0]}\`: a TollkeeperStore takes ${known}`);
    }
    this.#options = { store, algorithm, redis: prefix === undefined ? redis : { prefix, ...redis } };
    this.prefix = prefix;
    this.localKeys = store.startsWith("memory:");
  }

  init({ windowMs, limit }) {
    this.#refused = null;
    try {
      if (typeof limit !== "number") {
        throw new TypeError(
          "a TollkeeperStore needs a number as `limit`: use tollkeeper/express and `tiers` for limits that differ",
        );
      }
      const { store, algorithm, redis } = this.#options;
      const rate = limit === 0 ? "0/s" : `${limit}/${windowMs}ms`;
      // `share`: an empty key is counted like any other.
      const limits = [{ name: NAME, by: "key", rate, algorithm, missing: "share" }];
      this.#limiter = new Limiter({ store, redis, limits });
      this.#limit = limit;
      this.#windowMs = windowMs;
    } catch (error) {
      // express-rate-limit goes on after an error here, so `increment` reports it again.
      this.#refused = error.message;
      throw error;
    }
  }

  async increment(key) {
    const decision = await this.#open().check({ key });
    if (decision.charge !== null) this.#remember(key, decision.charge);
    return this.#info(decision);
  }

  async get(key) {
    const decision = await this.#open().peek({ key });
    if (decision.remaining === this.#limit) return undefined;
    return this.#info(decision);
  }

  /** Gives the newest charge of the key back. */
  async decrement(key) {
    const charges = this.#charges.get(key);
    const charge = charges?.pop();
    if (charge === undefined) return;
    this.#remembered -= 1;
    if (charges.length === 0) this.#charges.delete(key);
    await this.#open().refund(charge);
  }

  async resetKey(key) {
    this.#remembered -= this.#charges.get(key)?.length ?? 0;
    this.#charges.delete(key);
    await this.#open().forget(NAME, { key });
  }

  async shutdown() {
    await this.#limiter?.close();
  }

  #open() {
    if (this.#refused !== null) throw new Error(this.#refused);
    return this.#limiter;
  }

  #info({ allowed, remaining, resetAfter, retryAfter }) {
    // Without a count (a failure policy has decided) an admitted request is the first one.
    const totalHits = allowed ? Math.max(1, this.#limit - (remaining ?? this.#limit - 1)) : this.#limit + 1;
    const seconds = (allowed ? resetAfter : retryAfter) ?? this.#windowMs / 1000;
    return { totalHits, resetTime: new Date(Date.now() + seconds * 1000) };
  }

  #remember(key, charge) {
    const charges = this.#charges.get(key) ?? [];
    this.#charges.delete(key);
    this.#charges.set(key, charges);
    charges.push(charge);
    this.#remembered += 1;
    if (this.#remembered <= MAX_CHARGES) return;
    const [oldest, old] = this.#charges.entries().next().value;
    old.shift();
    this.#remembered -= 1;
    if (old.length === 0) this.#charges.delete(oldest);
  }
}
