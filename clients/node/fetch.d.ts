import type { Decision, Limiter, MiddlewareOptions } from "./index.js";

export interface FetchOptions<Subject = Request> extends MiddlewareOptions<Subject> {
  /** The address of the client's connection. Gets all arguments of the handler: Bun and Deno pass the connection. */
  ip?: (subject: Subject, ...rest: any[]) => string | undefined;
  /** Answers a refused request; the rate-limit headers are added. */
  onRefused?: (subject: Subject, decision: Decision) => Response | void | Promise<Response | void>;
  /** Answers a request that could not be decided, instead of throwing. */
  onError?: (error: Error, subject: Subject) => Response | Promise<Response>;
}

/** Puts limits before a handler: `export const POST = withLimits(limiter, handler, { ip })`. */
export function withLimits<Rest extends any[]>(
  limiter: Limiter,
  handler: (request: Request, ...rest: Rest) => Response | Promise<Response>,
  options?: FetchOptions,
): (request: Request, ...rest: Rest) => Promise<Response>;

/** The same in two steps, for frameworks with hooks of their own. */
export function limits(limiter: Limiter, options?: FetchOptions): (request: Request, ...rest: any[]) => Promise<{
  /** The refusal; `null` if the request may pass. */
  response: Response | null;
  /** Adds headers to the handler's response, and follows it to its end. */
  finish(response: Response): Response;
  /** Ends a request that has no response. */
  gone(): void;
}>;
