// Checks the options that all middlewares take.

import { onlyOptions } from "./request.js";

/** Checks the options of a middleware when it is created. */
export function middlewareOptions(limiter, options, more = []) {
  if (typeof limiter?.check !== "function") {
    throw new TypeError("the first argument must be a Limiter: tollkeeper(new Limiter({ … }), { … })");
  }
  const known = onlyOptions(options, ["facts", "cost", "skip", "onRefused", "onError", ...more]);
  for (const name of Object.keys(known)) {
    if (known[name] !== undefined && typeof known[name] !== "function") {
      throw new TypeError(`the option \`${name}\` must be a function, not ${typeof known[name]}`);
    }
  }
  return known;
}
