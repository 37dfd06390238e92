// What Express and Fastify share: requests and responses of Node's `http`.

import { UNREAD, badInput, rateLimitsOf } from "./visit.js";

/**
 * Decides a request with `start`, which returns a visit or a promise of one, and calls what the framework does next:
 * - `pass()` and `setHeaders(headers)` if it is admitted,
 * - `refuse(status, headers, body)` or the option `onRefused` if it is not,
 * - `needsBody(visit)` if a limit needs the body and `body()` is unread; it may return an error,
 * - the option `onError`, or `fail(error)`, if it could not be decided, or a callback of the application throws.
 *
 * `response` is Node's: its end releases slots.
 */
export function decide(limiter, { onRefused, onError }, response, framework, start) {
  const fail = (error) => {
    if (onError === undefined) framework.fail(error);
    else call(() => onError(error), framework.fail);
  };
  const arrived = (visit) => {
    if (visit.needsBody !== null) {
      const body = framework.body();
      if (body.kind !== UNREAD) return follow(() => visit.withBody(body));
      const error = framework.needsBody(visit);
      return error && fail(error);
    }
    // The client left, or something else has answered, while the decision was awaited.
    if (response.headersSent || response.destroyed) {
      visit.gone();
      return visit.allowed && !response.destroyed ? framework.pass() : undefined;
    }
    if (!visit.allowed) {
      if (onRefused === undefined || visit.decision === null) {
        return framework.refuse(visit.status, visit.headers, visit.body);
      }
      framework.setHeaders(rateLimitsOf(visit.headers));
      return call(() => onRefused(visit.decision), fail);
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
    fail(error);
  };
  const follow = (start) => {
    let visit;
    try {
      visit = start();
    } catch (error) {
      return failed(error);
    }
    // Outside of `try`: an error of the handler that `pass` calls is not an error of the limiter.
    if (typeof visit.then !== "function") return arrived(visit);
    // In a promise nothing else catches what is thrown, and it would end the process.
    visit.then(arrived, failed).catch(framework.fail);
  };
  follow(start);
}

/** Calls a callback of the application. What it throws, or rejects with, goes to `failed`. */
function call(callback, failed) {
  try {
    const result = callback();
    if (typeof result?.then === "function") result.then(undefined, failed);
  } catch (error) {
    failed(error);
  }
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
