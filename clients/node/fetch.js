// Handlers that take a `Request` and return a `Response`: Next, Bun, Deno, Workers, Hono.

import { middlewareOptions } from "./lib/options.js";
import { BROKEN, RAW, TOO_LARGE, UNREAD, badInput, enter, latin1 } from "./lib/visit.js";

const MAX_BODY = 64 * 1024;

/**
 * Puts limits before a handler.
 * @param {import("./index.js").Limiter} limiter
 * @param {(request: Request, ...rest: any[]) => Response | Promise<Response>} handler
 */
export function withLimits(limiter, handler, options) {
  const enterWith = limits(limiter, options);
  return async function (request, ...rest) {
    const entered = await enterWith(request, ...rest);
    if (entered.response !== null) return entered.response;
    try {
      return entered.finish(await handler.call(this, request, ...rest));
    } catch (error) {
      entered.gone();
      throw error;
    }
  };
}

/**
 * The same in two steps, for frameworks with hooks of their own: `response` is the refusal or `null`; `finish` adds the
 * headers to the handler's response, and `gone` ends a request that has none.
 */
export function limits(limiter, options) {
  const { ip, ...known } = middlewareOptions(limiter, options, ["ip"]);
  // Bun and Deno pass the connection after the request, so `ip` gets all arguments of the handler.
  return (request, ...rest) => enterRequest(limiter, known, request, request, arrivalOf(request, ip?.(request, ...rest)));
}

/** Decides a `Request`; `subject` is what the callbacks of the application get. */
export async function enterRequest(limiter, options, subject, request, arrival) {
  const { facts, cost, skip, onRefused, onError } = options;
  try {
    if (skip?.(subject)) return passed(null);
    const own = { facts, cost, onRefused };
    let visit = await enter(limiter, own, subject, arrival, { kind: UNREAD, text: "" });
    if (visit.needsBody !== null) visit = await enter(limiter, own, subject, arrival, await bodyOf(request));
    if (visit.allowed) {
      await held(visit, request.signal);
      return passed(visit);
    }
    if (onRefused === undefined || visit.decision === null) return refused(visit);
    const answer = await onRefused(subject, visit.decision);
    return answer instanceof Response ? { ...refused(visit), response: withHeaders(answer, rateLimits(visit.headers)) } : refused(visit);
  } catch (error) {
    const visit = badInput(error);
    if (visit !== null) return refused(visit);
    limiter.reportError(error);
    if (onError === undefined) throw error;
    return { ...passed(null), response: await onError(error, subject) };
  }
}

function refused(visit) {
  const response = new Response(visit.body, { status: visit.status, headers: visit.headers });
  return { response, finish: () => response, gone() {} };
}

function passed(visit) {
  return {
    response: null,
    finish(response) {
      if (visit === null) return response;
      visit.answered(response.status);
      const answer = withHeaders(response, visit.headers);
      if (!visit.isOpen) return answer;
      if (answer.body === null) {
        visit.gone();
        return answer;
      }
      return new Response(watched(answer.body, () => visit.gone()), answer);
    },
    gone: () => visit?.gone(),
  };
}

/** The same response with these headers; those of some responses, such as redirects, are immutable. */
function withHeaders(response, headers) {
  const names = Object.keys(headers);
  if (names.length === 0) return response;
  try {
    for (const name of names) response.headers.set(name, headers[name]);
    return response;
  } catch {
    const copy = new Response(response.body, response);
    for (const name of names) copy.headers.set(name, headers[name]);
    return copy;
  }
}

function rateLimits({ "content-type": _type, "cache-control": _cache, ...headers }) {
  return headers;
}

/** A stream that calls `ended` when it ends, fails or is cancelled. */
function watched(body, ended) {
  const reader = body.getReader();
  return new ReadableStream({
    async pull(controller) {
      try {
        const { done, value } = await reader.read();
        if (!done) return controller.enqueue(value);
        ended();
        controller.close();
      } catch (error) {
        ended();
        controller.error(error);
      }
    },
    cancel(reason) {
      ended();
      return reader.cancel(reason);
    },
  });
}

/** At most 64 KiB of a copy of the body; the handler reads the original. */
async function bodyOf(request) {
  if (request.body === null) return { kind: RAW, text: "" };
  let text = "";
  try {
    const reader = request.clone().body.getReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return { kind: RAW, text };
      if (text.length + value.length > MAX_BODY) {
        reader.cancel().catch(() => {});
        return { kind: TOO_LARGE, text: "" };
      }
      text += latin1(value);
    }
  } catch {
    return { kind: BROKEN, text: "" };
  }
}

/** Holds an admitted request of a leaky bucket; a client that leaves meanwhile is not held. */
function held(visit, signal) {
  if (visit.delay === 0) return undefined;
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, visit.delay * 1000);
    const leave = () => {
      clearTimeout(timer);
      visit.gone();
      reject(signal.reason);
    };
    if (signal?.aborted) leave();
    else signal?.addEventListener("abort", leave);
  });
}

export function arrivalOf(request, peer) {
  const url = new URL(request.url);
  const headers = [...request.headers].flat();
  if (!request.headers.has("host")) headers.push("host", url.host);
  return { method: request.method, target: url.pathname + url.search, peer: peer ?? "", headers };
}
