// Calls a server. If it does not answer in time, `onUnavailable` decides. After five failures in a row, calls pause for
// a second.

import { CallTimeout, TollkeeperError, errorOf } from "./error.js";
import { onlyOptions } from "./request.js";
import { HttpTransport } from "./http.js";
import { RespTransport } from "./resp.js";
import { MAX_TIMER_MS } from "./timer.js";

const FAILURES = 5;
const PAUSE_MS = 1000;
const DECIDES = new Set(["check", "peek", "reserve", "acquire"]);

export class Remote {
  #transport;
  #timeout;
  #onUnavailable;
  #report;
  #failures = 0;
  #pausedUntil = 0;

  constructor(options, report) {
    const { server, token, timeout = 200, onUnavailable = "allow" } = onlyOptions(options, [
      "server",
      "token",
      "timeout",
      "onUnavailable",
    ]);
    if (!(Number.isFinite(timeout) && timeout > 0 && timeout <= MAX_TIMER_MS)) {
      throw new TypeError(`timeout ${timeout} is not a number of milliseconds from 1 to ${MAX_TIMER_MS}, such as 200`);
    }
    if (onUnavailable !== "allow" && onUnavailable !== "deny") {
      throw new TypeError(`onUnavailable must be "allow" or "deny", not ${JSON.stringify(onUnavailable)}`);
    }
    this.#transport = transportOf(server, token);
    this.#timeout = timeout;
    this.#onUnavailable = onUnavailable;
    this.#report = report;
    /** Whether `acquire` works: not over RESP. */
    this.hasSlots = this.#transport.hasSlots;
  }

  /**
   * @param {string} verb
   * @param {{ pairs?: unknown[], text?: string, cost?: unknown, limit?: string }} request
   * @param {AbortSignal | undefined} signal of the caller
   * @param {(wire: object, headers: () => Record<string, string>) => any} read
   */
  async ask(verb, request, signal, read) {
    return read(...(await this.#ask(verb, request, signal)));
  }

  async #ask(verb, request, signal) {
    signal?.throwIfAborted();
    if (performance.now() < this.#pausedUntil) {
      return this.#unavailable(verb, "failed 5 times in a row: calls are paused for a second");
    }
    let answer;
    try {
      answer = await within(this.#timeout, signal, (own) => this.#transport.send(verb, request, own));
    } catch (error) {
      if (signal?.aborted) throw signal.reason;
      if (error instanceof TollkeeperError || error instanceof Unsupported) throw error;
      return this.#failed(verb, reasonOf(error, this.#timeout));
    }
    const wire = parsed(answer.text);
    if (answer.status >= 500 && !(wire?.error && !DECIDES.has(verb))) {
      return this.#failed(verb, `answered ${answer.status}`);
    }
    this.#failures = 0;
    if (wire?.error?.code) throw errorOf(wire);
    const readable = wire !== null && (!DECIDES.has(verb) || typeof wire.allowed === "boolean");
    if ((answer.status === 200 || answer.status === 429) && readable) return [wire, () => answer.headers(wire)];
    const what = readable ? "" : " with a body that is not an answer of Tollkeeper";
    const message = `${this.#transport.url} answered ${answer.status}${what}: check the URL`;
    throw new TollkeeperError("unexpected_answer", message);
  }

  #failed(verb, what) {
    this.#failures += 1;
    if (this.#failures >= FAILURES) this.#pausedUntil = performance.now() + PAUSE_MS;
    this.#report(new TollkeeperError("unavailable", `tollkeeper at ${this.#transport.url} ${what}`));
    return this.#unavailable(verb, what);
  }

  #unavailable(verb, what) {
    if (!DECIDES.has(verb)) {
      throw new TollkeeperError("unavailable", `tollkeeper at ${this.#transport.url} ${what}`);
    }
    const allowed = this.#onUnavailable === "allow";
    const wire = { allowed, binding: null, retry_after: allowed ? null : 1, delay: 0, degraded: this.#onUnavailable };
    if (!allowed) wire.reason = "the limiter is unavailable";
    Object.assign(wire, { charge: null, limits: [] });
    return [wire, () => (allowed ? {} : { "retry-after": "1" })];
  }

  close() {
    this.#transport.close();
  }
}

/** A call that a transport does not have. */
class Unsupported extends TypeError {}

function transportOf(server, token) {
  let url;
  try {
    url = new URL(server);
  } catch {
    throw new TypeError(`server ${JSON.stringify(server)} is not a URL, such as "http://127.0.0.1:8080"`);
  }
  switch (url.protocol) {
    case "http:":
    case "https:":
      return new HttpTransport(url, token);
    case "redis:":
    case "rediss:":
      return new RespTransport(url, token, Unsupported);
    default:
      throw new TypeError(`server ${JSON.stringify(server)} must begin with http://, https://, redis:// or rediss://`);
  }
}

/** Runs `send` with a signal that fires after `timeout` ms or with the caller's. */
async function within(timeout, signal, send) {
  const own = new AbortController();
  const late = setTimeout(() => own.abort(new CallTimeout()), timeout);
  const cancel = () => own.abort(signal.reason);
  signal?.addEventListener("abort", cancel, { once: true });
  try {
    return await send(own.signal);
  } finally {
    clearTimeout(late);
    signal?.removeEventListener("abort", cancel);
  }
}

function reasonOf(error, timeout) {
  if (error instanceof CallTimeout) return `did not answer within ${timeout} ms`;
  return `did not answer: ${error.cause?.message || error.cause?.code || error.message || error.code}`;
}

function parsed(text) {
  if (typeof text !== "string") return text;
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
