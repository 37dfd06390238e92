// What a limiter answers: a decision, and the state of each limit that applied.

/** A limit of a decision, with the names of JavaScript. */
export function limitState(wire) {
  const state = {};
  for (const name of Object.keys(wire)) state[camel(name)] = wire[name];
  return state;
}

const camelCase = new Map();

function camel(name) {
  let known = camelCase.get(name);
  if (known === undefined) {
    known = name.replace(/_([a-z])/g, (_, letter) => letter.toUpperCase());
    camelCase.set(name, known);
  }
  return known;
}

/**
 * What the limits said about one request. Times are in seconds and not rounded.
 *
 * The engine answers with JSON, which is parsed when more than `allowed` is asked for: that takes as long as the
 * decision.
 */
export class Decision {
  #json;
  #wire;
  #headers;
  #limits = null;

  /**
   * @param {string | object} answer the decision as the HTTP API writes it, as text or parsed
   * @param {() => Record<string, string>} headers
   */
  constructor(answer, headers) {
    this.#json = typeof answer === "string" ? answer : null;
    this.#wire = typeof answer === "string" ? null : answer;
    this.#headers = headers;
  }

  get allowed() {
    return this.#wire === null ? this.#json.startsWith('{"allowed":true') : this.#wire.allowed;
  }

  get binding() {
    return this.toJSON().binding;
  }

  get limit() {
    return this.#binding?.limit ?? null;
  }

  get remaining() {
    return this.#binding?.remaining ?? null;
  }

  get resetAfter() {
    return this.#binding?.reset_after ?? null;
  }

  get retryAfter() {
    return this.toJSON().retry_after;
  }

  get delay() {
    return this.toJSON().delay;
  }

  get never() {
    return this.toJSON().never === true;
  }

  get reason() {
    return this.toJSON().reason ?? null;
  }

  get degraded() {
    return this.toJSON().degraded;
  }

  get charge() {
    return this.toJSON().charge ?? null;
  }

  get limits() {
    this.#limits ??= this.toJSON().limits.map(limitState);
    return this.#limits;
  }

  /** The rate-limit headers of a response, with names in lower case. */
  headers() {
    return this.#headers();
  }

  /** The decision as the HTTP API writes it. */
  toJSON() {
    this.#wire ??= JSON.parse(this.#json);
    return this.#wire;
  }

  /** What `console.log` shows. */
  [Symbol.for("nodejs.util.inspect.custom")](depth, options, inspect) {
    return `Decision ${inspect(limitState(this.toJSON()), options)}`;
  }

  get #binding() {
    const { binding, limits } = this.toJSON();
    return binding === null ? undefined : limits.find((limit) => limit.name === binding);
  }
}

/** Only `Retry-After`: a decision does not say which limits clients may see. */
export function retryAfterOnly(wire) {
  if (wire.allowed || wire.retry_after === null) return {};
  return { "retry-after": String(Math.max(1, Math.ceil(wire.retry_after))) };
}
