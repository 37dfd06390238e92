// A limiter with a manual clock, for tests of an application.

import { Limiter } from "./index.js";

/**
 * A limiter in memory with a manual clock, so that tests do not sleep.
 * @param {object} options the limits, and `at`: the time at the start, in Unix seconds
 */
export function testing({ at = 0, ...options }) {
  let engine;
  const limiter = new Limiter(options, { at, opened: (opened) => (engine = opened) });
  let now = at;
  const clock = {
    /** Unix seconds. */
    get now() {
      return now;
    },
    /** Lets this many seconds pass. */
    advance(seconds) {
      engine.advance(seconds);
      now += seconds;
    },
  };
  return { limiter, clock };
}
