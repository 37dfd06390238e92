/** A string, a whole number, a boolean, or the first 32 hexadecimal digits of a SHA-256. `undefined`: absent. */
export type FactValue = string | number | bigint | boolean | { sha256: string } | undefined;
export type Facts = { readonly [name: string]: FactValue };

/** A failure policy that decided because the store or the server did not answer. */
export type Degraded = "allow" | "deny" | "local";

/** One limit of a decision. Times are in seconds, not rounded. */
export interface LimitState {
  name: string;
  key: (string | null)[];
  algorithm: string;
  mode: "enforce" | "shadow";
  allowed: boolean;
  cost: number;
  /** What an unused key can take at once. */
  limit: number;
  remaining: number | null;
  retryAfter: number | null;
  /** Seconds until the full limit is available. */
  resetAfter: number | null;
  degraded: Degraded | null;
  never?: true;
  approximate?: true;
  overflow?: true;
  override?: { until: number | null };
}

export interface ExplainedLimit {
  name: string;
  mode: string;
  applies: boolean;
  why: string;
  key: string | null;
  cost: number | null;
}

export class Decision {
  private constructor();
  /** Whether the request may pass. A refusal is a decision, not an error. */
  readonly allowed: boolean;
  /** The limit that decided; `null` if none applied. */
  readonly binding: string | null;
  /** Of the binding limit: what an unused key can take at once. */
  readonly limit: number | null;
  /** Of the binding limit: units left after this decision. */
  readonly remaining: number | null;
  /** Of the binding limit: seconds until the full limit is available. */
  readonly resetAfter: number | null;
  /** Seconds until a retry can pass; `null` if allowed, or if waiting does not help. */
  readonly retryAfter: number | null;
  /** Seconds that an admitted request should wait (leaky buckets only). */
  readonly delay: number;
  /** Whether waiting does not help. */
  readonly never: boolean;
  /** A sentence for people, on refusals. */
  readonly reason: string | null;
  readonly degraded: Degraded | null;
  /** A receipt for `refund` and `settle`. */
  readonly charge: string | null;
  readonly limits: LimitState[];
  /** The rate-limit headers of a response, with names in lower case. */
  headers(): Record<string, string>;
  /** The decision as the HTTP API writes it. */
  toJSON(): Record<string, unknown>;
}

/** Bad input, a wrong token or URL, an answer that cannot be read; with a code of the HTTP API. */
export class TollkeeperError extends Error {
  constructor(code: string, message: string, where?: string | null);
  readonly code: string;
  readonly where: string | null;
}

export class Slot {
  private constructor();
  /** `false` if it was released or has ended. */
  release(): Promise<boolean>;
  /** Starts its `ttl` anew; `false` if it was released or has ended. */
  renew(): Promise<boolean>;
  [Symbol.asyncDispose](): Promise<void>;
}

/** A limit in the shape of the config file. Rates and durations are text: `100/min`, `60s`. */
export interface LimitConfig {
  name: string;
  by?: string | string[];
  rate?: string;
  burst?: number;
  limit?: number;
  algorithm?: "token-bucket" | "leaky-bucket" | "fixed-window" | "sliding-window" | "sliding-log" | "concurrency";
  when?: Record<string, string | string[]>;
  unless?: Record<string, string | string[]>;
  mode?: "enforce" | "shadow" | "off";
  [key: string]: unknown;
}

/** Limits of a config file, which is followed: a change takes effect within a second. */
export interface FileOptions {
  config: string;
  /** Instead of the file's store. */
  store?: string;
  /** Limiters with one name are one engine, across worker threads. */
  name?: string;
}

/** The keys of the config file, with `limits`. */
export interface LimitsOptions {
  limits: LimitConfig[];
  /** `memory://` (default) or `redis://…` */
  store?: string;
  /** Limiters with one name are one engine, across worker threads. */
  name?: string;
  http?: Record<string, unknown>;
  headers?: string[];
  [key: string]: unknown;
}

export interface ServerOptions {
  /** `http://127.0.0.1:8080`, or the RESP listener: `redis://127.0.0.1:6380`. */
  server: string;
  token?: string;
  /** Milliseconds; 200 if absent. */
  timeout?: number;
  /** Decides while the server does not answer; "allow" if absent. */
  onUnavailable?: "allow" | "deny";
}

/** A request of Node's `http`, such as that of an `upgrade`. */
export interface IncomingRequest {
  method?: string;
  url?: string;
  originalUrl?: string;
  rawHeaders: string[];
  socket: { remoteAddress?: string };
  body?: unknown;
}

/** The outcome of a request. */
export interface Visit {
  readonly allowed: boolean;
  /** Status, headers and body of the response to a refused request. */
  readonly status: number;
  readonly headers: Record<string, string>;
  readonly body: string;
  /** Seconds to wait before the handler runs. */
  readonly delay: number;
  readonly decision: Decision | null;
  /** The handler has answered: refunds what `deduct_when` and `refund_when` give back. */
  answered(status: number): void;
  /** The response has been sent, the client is gone or the tunnel has ended: releases slots. */
  gone(): void;
}

export class Limiter {
  constructor(options: FileOptions | LimitsOptions | ServerOptions);
  /** The active limits; only with `config` or `limits`. */
  readonly policy: { version: number; source: string; limits: LimitConfig[] };

  check(facts: Facts, options?: { cost?: number; signal?: AbortSignal }): Promise<Decision>;
  checkSync(facts: Facts, options?: { cost?: number }): Decision;
  peek(facts: Facts, options?: { cost?: number; signal?: AbortSignal }): Promise<Decision>;
  usage(facts: Facts, options?: { signal?: AbortSignal }): Promise<LimitState[]>;
  explain(facts: Facts, options?: { signal?: AbortSignal }): Promise<ExplainedLimit[]>;
  reserve(facts: Facts, options: { ttl: string; cost?: number; signal?: AbortSignal }): Promise<Decision>;
  settle(charge: string, options: { cost?: number; facts?: Facts }): Promise<boolean>;
  refund(charge: string, options?: { cost?: number; facts?: Facts }): Promise<boolean>;
  forget(limit: string, facts: Facts): Promise<boolean>;
  acquire(
    facts: Facts,
    options?: { cost?: number; signal?: AbortSignal },
  ): Promise<{ decision: Decision; slot: Slot | null }>;
  untilAllowed(facts: Facts, options?: { cost?: number; timeout?: number; signal?: AbortSignal }): Promise<Decision>;
  visit(
    request: IncomingRequest,
    options?: { facts?: (request: any) => Facts | Promise<Facts>; cost?: (request: any) => number },
  ): Promise<Visit>;

  on(event: "reload", listener: (version: number) => void): this;
  on(event: "error", listener: (error: Error) => void): this;
  off(event: "reload" | "error", listener: (value: any) => void): this;
  close(): Promise<void>;
  /** Reports a problem to the `error` listeners or the console, at most once a second. */
  reportError(error: Error): void;
  [Symbol.asyncDispose](): Promise<void>;
}

/** Options of every middleware. */
export interface MiddlewareOptions<Request> {
  /** Facts that only the application knows; they take precedence over those read from the request. */
  facts?: (request: Request) => Facts | Promise<Facts>;
  cost?: (request: Request) => number;
  /** Requests that no limit applies to. */
  skip?: (request: Request) => boolean;
}
