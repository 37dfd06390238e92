import { decide } from "./lib/node.js";
import { middlewareOptions } from "./lib/options.js";
import { arrivalOf, parsedBody } from "./lib/visit.js";

/**
 * Plugin for Fastify: decides in `onRequest`, and in `preHandler` a request whose limits need a field of its body.
 * @param {import("fastify").FastifyInstance} app
 */
export default function tollkeeper(app, { limiter, hook = "onRequest", prefix, logLevel, ...options }, done) {
  const { facts, cost, skip, onRefused, onError } = middlewareOptions(limiter, options);
  if (hook !== "onRequest" && hook !== "preHandler") {
    throw new TypeError(`the option \`hook\` must be "onRequest" or "preHandler", not ${JSON.stringify(hook)}`);
  }
  const awaitsBody = new WeakSet();

  const decideIn = (here) => (request, reply, next) => {
    const fail = (error) => (onError === undefined ? next(error) : onError(error, request, reply, next));
    const own = { facts, cost, skip, onRefused: onRefused && ((decision) => onRefused(request, reply, decision)) };
    const body = parsedBody(request.body ?? undefined);
    decide(limiter, own, request, reply.raw, arrivalOf(request.raw), body, {
      pass: () => next(),
      setHeaders: (headers) => reply.headers(headers),
      refuse: (status, headers, body) => reply.code(status).headers(headers).send(body),
      needsBody(what) {
        if (here === "preHandler") return fail(new Error(`${what}, and this request has no body that Fastify parses`));
        awaitsBody.add(request);
        next();
      },
      fail,
    });
  };
  const inPreHandler = decideIn("preHandler");
  if (hook === "onRequest") app.addHook("onRequest", decideIn("onRequest"));
  app.addHook("preHandler", (request, reply, next) => {
    if (hook === "preHandler" || awaitsBody.has(request)) inPreHandler(request, reply, next);
    else next();
  });
  done();
}

// The hooks apply to the application that registers the plugin, not only to the plugin's own routes.
tollkeeper[Symbol.for("skip-override")] = true;
tollkeeper[Symbol.for("fastify.display-name")] = "tollkeeper";
