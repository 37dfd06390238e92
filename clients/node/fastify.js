// Plugin for Fastify 5.

import { decide } from "./lib/node.js";
import { middlewareOptions } from "./lib/options.js";
import { UNREAD, arrivalOf, enter, parsedBody } from "./lib/visit.js";

/**
 * Plugin for Fastify: decides in `onRequest`, and in `preHandler` a request whose limits need a field of its body.
 * @param {import("fastify").FastifyInstance} app
 */
export default function tollkeeper(app, { limiter, hook = "onRequest", prefix, logLevel, ...options }, done) {
  const { onRefused, onError, ...known } = middlewareOptions(limiter, options);
  if (hook !== "onRequest" && hook !== "preHandler") {
    throw new TypeError(`the option \`hook\` must be "onRequest" or "preHandler", not ${JSON.stringify(hook)}`);
  }
  /** Request to the visit that waits for its body. */
  const awaitingBody = new WeakMap();

  const decideIn = (here, request, reply, next) => {
    const own = {
      ...known,
      onRefused: onRefused && ((decision) => onRefused(request, reply, decision)),
      onError: onError && ((error) => onError(error, request, reply, next)),
    };
    const framework = {
      pass: () => next(),
      fail: next,
      setHeaders: (headers) => reply.headers(headers),
      refuse: (status, headers, body) => reply.code(status).headers(headers).send(body),
      body: () => (here === "onRequest" ? { kind: UNREAD, text: "" } : parsedBody(request.raw, request.body)),
      needsBody(visit) {
        if (here === "onRequest") {
          awaitingBody.set(request, visit);
          next();
          return undefined;
        }
        return new Error(`${visit.needsBody}, and this request has no body that Fastify parses`);
      },
    };
    const awaiting = awaitingBody.get(request);
    decide(limiter, own, reply.raw, framework, () => awaiting ?? enter(limiter, own, request, arrivalOf(request.raw)));
  };
  if (hook === "onRequest") app.addHook("onRequest", (...rest) => decideIn("onRequest", ...rest));
  app.addHook("preHandler", (request, reply, next) => {
    if (hook === "preHandler" || awaitingBody.has(request)) decideIn("preHandler", request, reply, next);
    else next();
  });
  done();
}

// The hooks apply to the application that registers the plugin, not only to the plugin's own routes.
tollkeeper[Symbol.for("skip-override")] = true;
tollkeeper[Symbol.for("fastify.display-name")] = "tollkeeper";
