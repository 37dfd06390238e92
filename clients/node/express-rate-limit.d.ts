interface ClientRateLimitInfo {
  totalHits: number;
  resetTime: Date | undefined;
}

export interface StoreOptions {
  /** `memory://` (default) or `redis://…` */
  store?: string;
  /** "sliding-window" if absent. */
  algorithm?: "token-bucket" | "fixed-window" | "sliding-window" | "sliding-log";
  /** Prefix of the keys in Redis; stores with one prefix and one window share counts. */
  prefix?: string;
  /** The section `redis` of the config: `{ deadline: "20ms" }`. */
  redis?: Record<string, unknown>;
}

/** A `Store` for express-rate-limit and hono-rate-limiter. */
export class TollkeeperStore {
  constructor(options?: StoreOptions);
  readonly prefix: string | undefined;
  readonly localKeys: boolean;
  init(options: { windowMs: number; limit: unknown }): void;
  increment(key: string): Promise<ClientRateLimitInfo>;
  get(key: string): Promise<ClientRateLimitInfo | undefined>;
  decrement(key: string): Promise<void>;
  resetKey(key: string): Promise<void>;
  shutdown(): Promise<void>;
}
