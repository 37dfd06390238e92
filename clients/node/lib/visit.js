// The steps of every middleware: facts and cost, decision, delay, handler, refund and release.

import { TollkeeperError, badInputStatus } from "./error.js";
import { bodyOf, pairsOf } from "./request.js";

/** The method of a `Limiter` that middlewares call. */
export const ENTER = Symbol("enter");

// How far the body of a request has been read.
export const UNREAD = 0;
export const RAW = 1;
export const JSON_BODY = 2;
export const TOO_LARGE = 3;
export const BROKEN = 4;

/** The largest body, in bytes, that facts are read from. */
export const MAX_BODY = 64 * 1024;
const NOT_READ = { kind: UNREAD, text: "" };
const EMPTY = { kind: RAW, text: "" };
const LARGE = { kind: TOO_LARGE, text: "" };
const QUOTA_EXCEEDED = "https://iana.org/assignments/http-problem-types#quota-exceeded";
const RENEW_MS = 10_000;
const PROBLEM = { "content-type": "application/problem+json", "cache-control": "no-store" };
const TITLES = {
  400: "Bad Request",
  413: "Content Too Large",
  415: "Unsupported Media Type",
  503: "Service Unavailable",
};

/**
 * A request as it arrived. `method`, `target` and `headers` (names and values in one list) are those that the client
 * sent, `peer` is the address of its connection, or "" if unknown.
 * @typedef {{ method: string, target: string, peer: string, headers: string[] }} Arrival
 */

/** The outcome of a request. */
export class Visit {
  /** @param {Partial<Visit>} fields */
  constructor(fields) {
    /** Whether the handler may run. */
    this.allowed = false;
    /** Status of the response to a refused request, such as 429. */
    this.status = 200;
    /** Seconds to wait before the handler runs. */
    this.delay = 0;
    /** Headers of the response, in lower case: of a refusal and of a handler's. */
    this.headers = {};
    /** Body of the response to a refused request. */
    this.body = "";
    /** The decision, if it was asked for. */
    this.decision = null;
    /** Which limit needs the body. If one does, `withBody(body)` decides with it, and with the same facts and cost. */
    this.needsBody = null;
    this.withBody = null;
    Object.assign(this, fields);
  }

  /** Whether `answered` and `gone` have something to do. */
  get isOpen() {
    return false;
  }

  /** The handler has answered with this status: refunds what `deduct_when` and `refund_when` give back. */
  answered() {}

  /** The response has been sent, or the client is gone: releases slots. */
  gone() {}
}

/** A visit that the engine keeps a ticket for. */
class TicketedVisit extends Visit {
  #engine;
  #ticket;

  constructor(engine, ticket, fields) {
    super(fields);
    this.#engine = engine;
    this.#ticket = ticket;
  }

  get isOpen() {
    return this.#ticket !== 0;
  }

  answered(status) {
    if (this.#ticket !== 0) this.#engine.answered(this.#ticket, status);
  }

  gone() {
    if (this.#ticket !== 0) this.#engine.gone(this.#ticket);
  }
}

/** The head of a request as the engine reads it. Node decodes header bytes as latin1, and the addon encodes them so. */
export function headOf({ method, target, peer, headers }) {
  let head = `${method}\n${target}\n${peer}`;
  for (let at = 0; at < headers.length; at += 2) {
    const name = headers[at];
    // HTTP/2 writes the host as a pseudo header.
    if (name[0] !== ":") head += `\n${name}\n${headers[at + 1]}`;
    else if (name === ":authority") head += `\nhost\n${headers[at + 1]}`;
  }
  return head;
}

/** The arrival of a request of Node's `http`. */
export function arrivalOf(request) {
  return {
    method: request.method,
    target: request.originalUrl ?? request.url,
    peer: request.socket?.remoteAddress ?? "",
    headers: request.rawHeaders,
  };
}

/** Facts and cost of the application for the engine; empty if there are none. */
export function ownOf(facts, cost) {
  if (facts === undefined && cost === undefined) return "";
  return bodyOf(pairsOf(facts ?? {}), cost);
}

/**
 * The body of a request of Node's `http` that a parser has read, for the engine: its fields, of which only top-level
 * strings, numbers and booleans can be facts. Unread if there is one and no parser has read it.
 */
export function parsedBody(request, body) {
  if (body == null && hasNoBody(request)) return EMPTY;
  if (body === undefined) return NOT_READ;
  if (Number(request.headers["content-length"]) > MAX_BODY || body?.length > MAX_BODY) return LARGE;
  if (typeof body === "string") return { kind: RAW, text: latin1(new TextEncoder().encode(body)) };
  if (ArrayBuffer.isView(body)) return { kind: RAW, text: latin1(body) };
  const flat = (value) => (typeof value === "object" && value !== null ? (Array.isArray(value) ? [] : {}) : value);
  if (typeof body !== "object" || body === null || Array.isArray(body)) {
    return { kind: JSON_BODY, text: JSON.stringify(flat(body)) ?? "null" };
  }
  const fields = Object.create(null);
  for (const name of Object.keys(body)) fields[name] = flat(body[name]);
  const asJson = (_, value) => (typeof value === "bigint" ? String(value) : value);
  return { kind: JSON_BODY, text: JSON.stringify(fields, asJson) };
}

function hasNoBody({ headers, stream }) {
  // HTTP/2 needs neither of the headers for a body.
  if (stream?.endAfterHeaders !== undefined) return stream.endAfterHeaders;
  return headers["transfer-encoding"] === undefined && Number(headers["content-length"] ?? 0) === 0;
}

/** Bytes as the characters 0 to 255. */
export function latin1(bytes) {
  let text = "";
  // In pieces, because each byte is an argument.
  for (let at = 0; at < bytes.length; at += 8192) text += String.fromCharCode(...bytes.subarray(at, at + 8192));
  return text;
}

/** Lets the engine decide. Returns the visit, or a promise of it on a remote store. */
export function visitEngine(engine, arrival, own, body = NOT_READ, wantsDecision, decisionOf) {
  const lines = engine.visit(headOf(arrival), own, body.kind, body.text, wantsDecision);
  const read = (text) => {
    const [outcome, ticket, delay, content, decision, ...pairs] = text.split("\n");
    if (outcome.startsWith("{")) throw new TollkeeperError("closed", "the limiter is closed");
    if (outcome === "body") {
      const withBody = (body) => visitEngine(engine, arrival, own, body, wantsDecision, decisionOf);
      return new Visit({ needsBody: content, withBody });
    }
    const headers = {};
    for (let at = 0; at + 1 < pairs.length; at += 2) headers[pairs[at]] = pairs[at + 1];
    return new TicketedVisit(engine, Number(ticket), {
      allowed: outcome === "pass",
      status: outcome === "pass" ? 200 : Number(outcome),
      delay: Number(delay),
      body: content,
      decision: decision === "" ? null : decisionOf(decision, headers),
      headers,
    });
  };
  return typeof lines === "string" ? read(lines) : lines.then(read);
}

/** Lets a server decide by the address, the method and the facts of the application. */
export async function visitServer(limiter, arrival, facts, cost, takesSlots) {
  // Spreading a Map or an instance of a class would lose its facts silently.
  if (facts != null) pairsOf(facts);
  const peer = arrival.peer.replace(/%.*$/, "");
  const all = { ip: peer === "" ? undefined : peer, method: arrival.method, ...facts };
  const options = cost === undefined ? {} : { cost };
  const { decision, slot } = takesSlots
    ? await limiter.acquire(all, options)
    : { decision: await limiter.check(all, options), slot: null };
  if (decision.allowed) {
    return new HeldVisit(slot, { allowed: true, delay: decision.delay, headers: decision.headers(), decision });
  }
  // Only a decision of `onUnavailable` refuses without a limit.
  const [status, body] =
    decision.binding === null
      ? [503, problem(503, "the rate limiter is unavailable")]
      : [429, refusal(decision.retryAfter)];
  return new Visit({ status, headers: { ...decision.headers(), ...PROBLEM }, body, decision });
}

/** A visit that holds a slot of a server. */
class HeldVisit extends Visit {
  #slot;
  #renewing;

  constructor(slot, fields) {
    super(fields);
    this.#slot = slot;
    if (slot === null) return;
    this.#renewing = setInterval(() => slot.renew().catch(() => {}), RENEW_MS);
    this.#renewing.unref?.();
  }

  get isOpen() {
    return this.#slot !== null;
  }

  gone() {
    clearInterval(this.#renewing);
    // A slot that cannot be released ends with its ttl.
    this.#slot?.release().catch(() => {});
    this.#slot = null;
  }
}

/** A decision does not say which limits clients may see, so the body names no limit. */
function refusal(retryAfter) {
  const title = "Request cannot be satisfied as assigned quota has been exceeded";
  const fields = { type: QUOTA_EXCEEDED, title, status: 429, "violated-policies": [] };
  return JSON.stringify(retryAfter === null ? fields : { ...fields, retry_after: retryAfter });
}

function problem(status, detail) {
  return JSON.stringify({ title: TITLES[status] ?? "Error", status, detail });
}

/** The response to a request that is invalid. */
export function problemOf(status, detail) {
  return new Visit({ status, headers: PROBLEM, body: problem(status, detail) });
}

/** Bad input of the client becomes a response; `null` for any other error. */
export function badInput(error) {
  const status = badInputStatus(error);
  return status === null ? null : problemOf(status, error.message);
}

/** The headers of a refusal without those of its body, for an application that writes its own. */
export function rateLimitsOf({ "content-type": _type, "cache-control": _cache, ...headers }) {
  return headers;
}

/**
 * Reads facts and cost of the application, and decides by the head of the request. Returns the visit, or a promise of
 * it.
 * @param {import("../index.js").Limiter} limiter
 */
export function enter(limiter, { facts, cost, skip, onRefused }, request, arrival) {
  if (skip?.(request)) return new Visit({ allowed: true });
  const own = facts?.(request);
  const go = (own) => limiter[ENTER](arrival, own, cost?.(request), onRefused !== undefined);
  return typeof own?.then === "function" ? own.then(go) : go(own);
}
