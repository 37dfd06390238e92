import { decide } from "./lib/node.js";
import { middlewareOptions } from "./lib/options.js";
import { arrivalOf, parsedBody } from "./lib/visit.js";

/**
 * Middleware for Express 4 and 5, and Connect.
 * @param {import("./index.js").Limiter} limiter
 * @param {object} [options]
 */
export function tollkeeper(limiter, options) {
  const { facts, cost, skip, onRefused, onError } = middlewareOptions(limiter, options);
  return function tollkeeper(request, response, next) {
    const setHeaders = (headers) => {
      for (const name of Object.keys(headers)) response.setHeader(name, headers[name]);
    };
    const fail = (error) => (onError === undefined ? next(error) : onError(error, request, response, next));
    const own = { facts, cost, skip, onRefused: onRefused && ((decision) => onRefused(request, response, decision)) };
    decide(limiter, own, request, response, arrivalOf(request), parsedBody(request.body), {
      pass: () => next(),
      setHeaders,
      refuse(status, headers, body) {
        setHeaders(headers);
        response.statusCode = status;
        response.end(body);
      },
      needsBody: (what) => fail(new Error(`${what}: put express.json() before tollkeeper()`)),
      fail,
    });
  };
}

export default tollkeeper;
