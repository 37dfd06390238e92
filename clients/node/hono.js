// Middleware for Hono, on Node and on other runtimes.

import { arrivalOf as arrivalOfRequest, enterRequest } from "./fetch.js";
import { middlewareOptions } from "./lib/options.js";
import { arrivalOf } from "./lib/visit.js";

/**
 * Middleware for Hono. On @hono/node-server it reads the client's address from the connection; on other runtimes pass
 * the option `ip`.
 * @param {import("./index.js").Limiter} limiter
 * @param {object} [options]
 */
export function tollkeeper(limiter, options) {
  const { ip, ...known } = middlewareOptions(limiter, options, ["ip"]);
  return async function tollkeeper(context, next) {
    const incoming = context.env?.incoming;
    const arrival = incoming === undefined ? arrivalOfRequest(context.req.raw) : arrivalOf(incoming);
    if (ip !== undefined) arrival.peer = ip(context) ?? "";
    const entered = await enterRequest(limiter, known, context, context.req.raw, arrival);
    if (entered.response !== null) return entered.response;
    try {
      await next();
    } catch (error) {
      entered.gone();
      throw error;
    }
    // Assigning merges headers of the old response into the new one, so it is cleared first.
    const response = entered.finish(context.res);
    if (response !== context.res) {
      context.res = undefined;
      context.res = response;
    }
  };
}

export default tollkeeper;
