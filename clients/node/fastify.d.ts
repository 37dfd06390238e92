import type { Decision, Limiter, MiddlewareOptions } from "./index.js";

export interface FastifyOptions<Request = any, Reply = any> extends MiddlewareOptions<Request> {
  limiter: Limiter;
  /** Where to decide: "preHandler" if `facts` reads the parsed body. "onRequest" if absent. */
  hook?: "onRequest" | "preHandler";
  /** Answers a refused request. The rate-limit headers are set already. */
  onRefused?: (request: Request, reply: Reply, decision: Decision) => void;
  onError?: (error: Error, request: Request, reply: Reply, next: (error?: Error) => void) => void;
}

/** Plugin for Fastify 5: `await app.register(tollkeeper, { limiter })`. */
export default function tollkeeper(app: any, options: FastifyOptions, done: (error?: Error) => void): void;
