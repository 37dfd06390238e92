import type { FileOptions, Limiter, LimitsOptions } from "./index.js";

export interface Clock {
  /** Unix seconds. */
  readonly now: number;
  /** Lets this many seconds pass. */
  advance(seconds: number): void;
}

/** A limiter in memory with a clock that moves only by `clock.advance`. */
export function testing(options: (LimitsOptions | FileOptions) & { at?: number }): { limiter: Limiter; clock: Clock };
