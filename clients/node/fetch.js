// Handlers that take a `Request` and return a `Response`: Next, Bun, Deno, Workers, Hono.

import { middlewareOptions } from "./lib/options.js";
import { BROKEN, MAX_BODY, RAW, TOO_LARGE, badInput, enter, latin1, rateLimitsOf } from "./lib/visit.js";

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
  return (request, ...rest) => {
    return enterRequest(limiter, known, request, request, arrivalOf(request, ip?.(request, ...rest)));
  };
}

/** Decides a `Request`; `subject` is what the callbacks of the application get. */
export async function enterRequest(limiter, options, subject, request, arrival) {
  const { onRefused, onError } = options;
  try {
    let visit = await enter(limiter, options, subject, arrival);
    if (visit.needsBody !== null) visit = await visit.withBody(await bodyOf(request));
    if (visit.allowed) {
      await held(visit, request.signal);
      return passed(visit);
    }
    if (onRefused === undefined || visit.decision === null) return refused(visit);
    const answer = await onRefused(subject, visit.decision);
    if (!(answer instanceof Response)) return refused(visit);
    return { ...refused(visit), response: withHeaders(answer, rateLimitsOf(visit.headers)) };
  } catch (error) {
    const visit = badInput(error);
    if (visit !== null) return refused(visit);
    limiter.reportError(error);
    if (onError === undefined) throw error;
    return { response: await onError(error, subject), finish: (response) => response, gone() {} };
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
      visit.answered(response.status);
      const answer = withHeaders(response, visit.headers);
      if (!visit.isOpen) return answer;
      if (answer.body === null) {
        visit.gone();
        return answer;
      }
      return new Response(watched(answer.body, () => visit.gone()), answer);
    },
    gone: () => visit.gone(),
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
    const leave = () => {
      clearTimeout(timer);
      visit.gone();
      reject(signal.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", leave);
      resolve();
    }, visit.delay * 1000);
    if (signal?.aborted) leave();
    else signal?.addEventListener("abort", leave, { once: true });
  });
}

export function arrivalOf(request, peer) {
  const url = new URL(request.url);
  const headers = [...request.headers].flat();
  if (!request.headers.has("host")) headers.push("host", url.host);
  return { method: request.method, target: url.pathname + url.search, peer: peer ?? "", headers };
}
