// Middleware for Express 4 and 5, and Connect.

import { decide } from "./lib/node.js";
import { middlewareOptions } from "./lib/options.js";
import { arrivalOf, enter, parsedBody, problemOf } from "./lib/visit.js";

/**
 * Middleware for Express 4 and 5, and Connect.
 * @param {import("./index.js").Limiter} limiter
 * @param {object} [options]
 */
export function tollkeeper(limiter, options) {
  const { onRefused, onError, ...known } = middlewareOptions(limiter, options);
  return function tollkeeper(request, response, next) {
    const setHeaders = (headers) => {
      for (const name of Object.keys(headers)) response.setHeader(name, headers[name]);
    };
    const own = {
      ...known,
      onRefused: onRefused && ((decision) => onRefused(request, response, decision)),
      onError: onError && ((error) => onError(error, request, response, next)),
    };
    const framework = {
      pass: () => next(),
      fail: next,
      setHeaders,
      refuse(status, headers, body) {
        setHeaders(headers);
        response.statusCode = status;
        response.end(body);
      },
      body: () => parsedBody(request, request.body),
      needsBody({ needsBody }) {
        // The parsers of Express define `body` on every request, and leave it undefined if they do not read its type.
        if ("body" in request) {
          const { status, headers, body } = problemOf(415, `${needsBody}, and no parser reads this content type`);
          framework.refuse(status, headers, body);
          return undefined;
        }
        return new Error(`${needsBody}: put express.json() before tollkeeper()`);
      },
    };
    decide(limiter, own, response, framework, () => enter(limiter, own, request, arrivalOf(request)));
  };
}

export default tollkeeper;
