// What Express and Fastify share: requests and responses of Node's `http`.

import { badInput, enter } from "./visit.js";

/**
 * Decides a request, and calls what the framework does next:
 * - `pass()` and `setHeaders(headers)` if it is admitted,
 * - `refuse(status, headers, body)` or the option `onRefused` if it is not,
 * - `needsBody(what)` if no parser has read the body that a limit needs,
 * - `fail(error)` if it could not be decided.
 *
 * `response` is Node's: its end releases slots.
 */
export function decide(limiter, options, request, response, arrival, body, framework) {
  const arrived = (visit) => {
    if (visit.needsBody !== null) return framework.needsBody(visit.needsBody);
    // The client left, or something else has answered, while the decision was awaited.
    if (response.headersSent || response.destroyed) {
      visit.gone();
      return visit.allowed && !response.destroyed ? framework.pass() : undefined;
    }
    if (!visit.allowed) {
      if (options.onRefused === undefined || visit.decision === null) {
        return framework.refuse(visit.status, visit.headers, visit.body);
      }
      const { "content-type": _type, "cache-control": _cache, ...headers } = visit.headers;
      framework.setHeaders(headers);
      return options.onRefused(visit.decision);
    }
    framework.setHeaders(visit.headers);
    if (visit.isOpen) followResponse(response, visit);
    if (visit.delay === 0) return framework.pass();
    const held = setTimeout(framework.pass, visit.delay * 1000);
    response.once("close", () => clearTimeout(held));
  };
  const failed = (error) => {
    const visit = badInput(error);
    if (visit !== null && !response.headersSent) return framework.refuse(visit.status, visit.headers, visit.body);
    limiter.reportError(error);
    framework.fail(error);
  };
  let visit;
  try {
    if (options.skip?.(request)) return framework.pass();
    visit = enter(limiter, options, request, arrival, body);
  } catch (error) {
    return failed(error);
  }
  // Outside of `try`: an error of the handler that `pass` calls is not an error of the limiter.
  if (typeof visit.then === "function") visit.then(arrived, failed);
  else arrived(visit);
}

/** The status decides about refunds; the end of the response releases slots. */
function followResponse(response, visit) {
  const answered = () => visit.answered(response.statusCode);
  response.once("finish", answered);
  response.once("close", () => {
    if (response.headersSent) answered();
    visit.gone();
  });
}
