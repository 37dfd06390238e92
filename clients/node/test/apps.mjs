// One application in every framework: `/`, `/login` (a JSON body with email and password) and `/stream`, which sends a
// chunk and stays open until the client leaves.

import { serve } from "@hono/node-server";
import connect from "connect";
import { once } from "node:events";
import { createServer } from "node:http";
import { after } from "node:test";
import express5 from "express";
import express4 from "express4";
import fastify from "fastify";
import { Hono } from "hono";
import { tollkeeper as onExpress } from "tollkeeper/express";
import onFastify from "tollkeeper/fastify";
import { withLimits } from "tollkeeper/fetch";
import { tollkeeper as onHono } from "tollkeeper/hono";

/** The limits of these applications. */
export const POLICY = {
  retry_after_jitter: "0%",
  http: {
    routes: ["/", "/login", "/stream"],
    facts: { email: { from: "body.email", normalize: ["lowercase", "trim"] } },
  },
  limits: [
    { name: "per-ip", when: { route: "/" }, by: "ip", rate: "5/day", algorithm: "sliding-log" },
    {
      name: "login",
      when: { route: "/login" },
      by: "email",
      rate: "5/day",
      algorithm: "sliding-log",
      deduct_when: { status: [401] },
    },
    { name: "streams", when: { route: "/stream" }, by: "ip", algorithm: "concurrency", limit: 1 },
  ],
};

/** Each dialect of rate-limit headers, and the names of its headers. */
export const DIALECTS = {
  ietf: ["ratelimit-policy", "ratelimit"],
  "x-ratelimit": ["x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"],
  "draft-03": ["ratelimit-limit", "ratelimit-remaining", "ratelimit-reset"],
  "draft-06": ["ratelimit-policy", "ratelimit-limit", "ratelimit-remaining", "ratelimit-reset"],
  "draft-07": ["ratelimit-policy", "ratelimit"],
};

const statusOf = ({ password }) => (password === "right" ? 200 : 401);

/**
 * Name to a function that starts the application: `(limiter, options, seen) => Promise<url>`. `seen` counts handled
 * requests.
 */
export const APPS = {
  "Express 5": (...rest) => expressApp(express5, ...rest),
  "Express 4": (...rest) => expressApp(express4, ...rest),
  Connect: connectApp,
  Fastify: fastifyApp,
  Hono: honoApp,
  fetch: fetchApp,
};

/** Whether the callbacks of an application get a `Request`, or the context of Hono, and return a `Response`. */
export const isFetch = (name) => name === "Hono" || name === "fetch";

async function expressApp(express, limiter, options, seen) {
  const app = express();
  app.disable("x-powered-by");
  app.use(express.json());
  app.use(onExpress(limiter, options));
  app.get("/", (request, response) => response.send(`hello ${seen()}`));
  app.post("/login", (request, response) => response.status(statusOf(request.body)).end());
  app.get("/stream", (request, response) => response.write("first\n"));
  // Without this, Express prints every error of the tests.
  app.use((error, request, response, next) => response.status(500).end(error.message));
  return listening(createServer(app).listen(0, "127.0.0.1"));
}

async function connectApp(limiter, options, seen) {
  const app = connect();
  app.use(express5.json());
  app.use(onExpress(limiter, options));
  app.use((request, response) => {
    if (request.url === "/stream") return response.write("first\n");
    if (request.url === "/login") response.statusCode = statusOf(request.body);
    response.end(`hello ${seen()}`);
  });
  return listening(createServer(app).listen(0, "127.0.0.1"));
}

async function fastifyApp(limiter, options, seen) {
  const app = fastify({ forceCloseConnections: true });
  await app.register(onFastify, { limiter, ...options });
  app.get("/", async () => `hello ${seen()}`);
  app.post("/login", async (request, reply) => reply.code(statusOf(request.body)).send(""));
  app.get("/stream", (request, reply) => reply.send(endless().pipeThrough(new TextEncoderStream())));
  after(() => app.close());
  return app.listen({ port: 0, host: "127.0.0.1" });
}

async function honoApp(limiter, options, seen) {
  const app = new Hono();
  app.use(onHono(limiter, options));
  app.get("/", (context) => context.text(`hello ${seen()}`));
  app.post("/login", async (context) => context.body(null, statusOf(await context.req.json())));
  app.get("/stream", (context) => context.body(endless().pipeThrough(new TextEncoderStream())));
  app.onError((error, context) => context.text(error.message, 500));
  return listening(serve({ fetch: app.fetch, port: 0, hostname: "127.0.0.1" }));
}

/** A handler as in Next, Bun and Deno; the environment of @hono/node-server is its second argument. */
async function fetchApp(limiter, options, seen) {
  const handler = async (request) => {
    switch (new URL(request.url).pathname) {
      case "/login":
        return new Response(null, { status: statusOf(await request.json()) });
      case "/stream":
        return new Response(endless().pipeThrough(new TextEncoderStream()));
      default:
        return new Response(`hello ${seen()}`);
    }
  };
  const ip = (request, { incoming }) => incoming.socket.remoteAddress;
  const limited = withLimits(limiter, handler, { ip, ...options });
  const failed = (error) => new Response(error.message, { status: 500 });
  const answered = (request, env) => limited(request, env).catch(failed);
  return listening(serve({ fetch: answered, port: 0, hostname: "127.0.0.1" }));
}

function endless() {
  return new ReadableStream({ start: (controller) => controller.enqueue("first\n") });
}

async function listening(server) {
  after(() => {
    server.close();
    server.closeAllConnections();
  });
  if (!server.listening) await once(server, "listening");
  return `http://127.0.0.1:${server.address().port}`;
}
