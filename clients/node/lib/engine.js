// The engine in this process: the addon's functions take and return text, and answer at once on a memory store.

import { TollkeeperError, errorOf } from "./error.js";
import { bodyOf, onlyOptions } from "./request.js";
import { loadAddon } from "./addon.js";

const WITH_HEADERS = new Set(["check", "reserve", "acquire"]);

const NO_HEADERS = () => ({});

export class Engine {
  #addon;
  #number;

  /**
   * @param {object} options of the `Limiter`
   * @param {(kind: string, message: string) => void} listener
   * @param {number} [at] a manual clock starts here, in Unix seconds
   */
  constructor(options, listener, at) {
    this.#addon = loadAddon();
    const { source, store, name, file } = sourceOf(options);
    try {
      this.#number = this.#addon.open(file, source, store ?? null, name ?? null, at ?? null, listener);
    } catch (error) {
      throw new TollkeeperError("invalid_config", error.message);
    }
    /** Whether calls wait for Redis. */
    this.isRemote = this.#addon.isRemote(this.#number);
  }

  /** Returns what `read` makes of the answer: at once on a memory store, a promise otherwise. */
  ask(verb, request, signal, read) {
    signal?.throwIfAborted();
    const text = this.#addon.ask(this.#number, verb, textOf(verb, request), WITH_HEADERS.has(verb));
    if (typeof text === "string") return read(...answered(text));
    return cancellable(text, signal).then((text) => read(...answered(text)));
  }

  /** Returns the lines of a visit, or a promise of them. */
  visit(head, own, bodyKind, body, wantsDecision) {
    return this.#addon.visit(this.#number, head, own, bodyKind, body, wantsDecision);
  }

  policy() {
    return JSON.parse(answered(this.#addon.policy(this.#number))[0]);
  }

  answered(ticket, status) {
    return this.#addon.answered(this.#number, ticket, status);
  }

  gone(ticket) {
    return this.#addon.gone(this.#number, ticket);
  }

  advance(seconds) {
    this.#addon.advance(this.#number, seconds);
  }

  close() {
    this.#addon.close(this.#number);
  }
}

function sourceOf(options) {
  if (options.config !== undefined) {
    const { config, store, name } = onlyOptions(options, ["config", "store", "name"]);
    return { file: true, source: String(config), store, name };
  }
  const { name, store, ...config } = options;
  return { file: false, source: JSON.stringify(config), store, name };
}

function textOf(verb, request) {
  if (request.text !== undefined) return request.text;
  const body = bodyOf(request.pairs, request.cost, request.ttl);
  return verb === "forget" ? `{"limit":${JSON.stringify(request.limit)},${body.slice(1)}` : body;
}

/** The JSON of an answer, and its headers, which the engine appends after a newline. */
function answered(text) {
  if (text.startsWith('{"error":')) throw errorOf(JSON.parse(text));
  const end = text.indexOf("\n");
  if (end === -1) return [text, NO_HEADERS];
  return [text.slice(0, end), () => headersOf(text.slice(end + 1))];
}

function headersOf(text) {
  const headers = {};
  const lines = text.split("\n");
  for (let at = 0; at + 1 < lines.length; at += 2) headers[lines[at]] = lines[at + 1];
  return headers;
}

/** Rejects when the signal fires. The engine still makes the decision, and charges it. */
function cancellable(promise, signal) {
  if (signal === undefined) return promise;
  return new Promise((resolve, reject) => {
    const cancel = () => reject(signal.reason);
    signal.addEventListener("abort", cancel, { once: true });
    promise.then(resolve, reject).finally(() => signal.removeEventListener("abort", cancel));
  });
}
