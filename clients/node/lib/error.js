// The error of this package, and which of its codes are the caller's mistakes.

/** Codes of the HTTP API for what a caller got wrong; any other error is one of the configuration. */
const BAD_INPUT = new Set([
  "invalid_json",
  "missing_field",
  "unknown_field",
  "duplicate_field",
  "invalid_fact",
  "invalid_cost",
  "invalid_ttl",
  "too_many",
  "too_large",
]);

/**
 * A request that could not be decided: bad input, a wrong token or URL, an answer that cannot be read.
 * A refusal is a decision and never an error.
 *
 * It has no `status`: Express and Fastify would answer with it, and a wrong token would be a 401 for the client.
 */
export class TollkeeperError extends Error {
  /**
   * @param {string} code a code of the HTTP API, such as `invalid_fact`
   * @param {string} message
   * @param {string | null} where the field that is wrong, such as `facts.user`
   */
  constructor(code, message, where = null) {
    super(message);
    this.name = "TollkeeperError";
    this.code = code;
    this.where = where;
  }
}

/** A call that took longer than the `timeout` of the limiter, unlike one that the caller's own signal ended. */
export class CallTimeout extends Error {}

/** The error of an answer `{"error":{"code":…}}`. */
export function errorOf(wire) {
  const { code, message, where } = wire.error;
  return new TollkeeperError(code, message, where ?? null);
}

/** The status for bad input of a client; `null` for any other error. */
export function badInputStatus(error) {
  if (!(error instanceof TollkeeperError) || !BAD_INPUT.has(error.code)) return null;
  return error.code === "too_large" ? 413 : 400;
}
