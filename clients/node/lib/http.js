// The HTTP API of a server, through `fetch`, which keeps connections alive.

import { bodyOf } from "./request.js";

const HEADERS = [
  "retry-after",
  "ratelimit-policy",
  "ratelimit",
  "ratelimit-limit",
  "ratelimit-remaining",
  "ratelimit-reset",
  "x-ratelimit-limit",
  "x-ratelimit-remaining",
  "x-ratelimit-reset",
];

export class HttpTransport {
  hasSlots = true;
  #base;
  #authorization;

  constructor(url, token) {
    this.url = url.origin + url.pathname.replace(/\/$/, "");
    this.#base = `${this.url}/v1/`;
    this.#authorization = token === undefined ? {} : { authorization: `Bearer ${token}` };
  }

  async send(verb, request, signal) {
    const response = await this.#fetch(verb, request, signal);
    const text = await response.text();
    return { status: response.status, text, headers: () => rateLimitHeaders(response.headers) };
  }

  #fetch(verb, request, signal) {
    const options = { signal, headers: this.#authorization, redirect: "manual" };
    switch (verb) {
      case "usage":
        return fetch(`${this.#base}usage?${queryOf(request.pairs)}`, options);
      case "forget":
        return fetch(`${this.#base}state?${queryOf(["limit", request.limit, ...request.pairs])}`, {
          ...options,
          method: "DELETE",
        });
      default: {
        const body = request.text ?? bodyOf(request.pairs, request.cost, request.ttl);
        return fetch(this.#base + verb, { ...options, method: "POST", body });
      }
    }
  }

  close() {}
}

function queryOf(pairs) {
  const query = new URLSearchParams();
  for (let at = 0; at < pairs.length; at += 2) {
    const value = pairs[at + 1];
    query.append(pairs[at], typeof value === "object" ? `sha256:${value.sha256}` : String(value));
  }
  return query;
}

function rateLimitHeaders(headers) {
  const found = {};
  for (const name of HEADERS) {
    const value = headers.get(name);
    if (value !== null) found[name] = value;
  }
  return found;
}
