import type { Limiter } from "./index.js";
import type { FetchOptions } from "./fetch.js";

/** Middleware for Hono: `app.use(tollkeeper(limiter))`. */
export function tollkeeper<Context = any>(
  limiter: Limiter,
  options?: FetchOptions<Context>,
): (context: Context & any, next: () => Promise<void>) => Promise<Response | void>;
export default tollkeeper;
