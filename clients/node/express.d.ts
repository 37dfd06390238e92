import type { IncomingMessage, ServerResponse } from "node:http";
import type { Decision, Limiter, MiddlewareOptions } from "./index.js";

type Next = (error?: any) => void;

export interface ExpressOptions<Request = any, Response = any> extends MiddlewareOptions<Request> {
  /** Answers a refused request. The rate-limit headers are set already. */
  onRefused?: (request: Request, response: Response, decision: Decision) => void;
  /** Answers a request that could not be decided, instead of `next(error)`. */
  onError?: (error: Error, request: Request, response: Response, next: Next) => void;
}

/** Middleware for Express 4 and 5, and Connect. */
export function tollkeeper<Request = any, Response = any>(
  limiter: Limiter,
  options?: ExpressOptions<Request, Response>,
): (request: IncomingMessage & Request, response: ServerResponse & Response, next: Next) => void;
export default tollkeeper;
