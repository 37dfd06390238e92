// The bypasses of docs/security.md, sent to Express over raw sockets: every spelling of one identity has one budget.

import assert from "node:assert/strict";
import { once } from "node:events";
import { connect } from "node:net";
import { test } from "node:test";
import express from "express";
import { Limiter } from "tollkeeper";
import { tollkeeper } from "tollkeeper/express";
import { served } from "./helper.mjs";

/** Sends each head to an application with this policy, and returns the statuses. */
async function statuses(policy, heads, options) {
  const app = express();
  app.use(express.json());
  app.use(tollkeeper(new Limiter(policy), options));
  app.use((request, response) => response.end());
  const port = Number(new URL(await served(app)).port);
  const all = [];
  for (const head of heads) {
    const socket = connect(port, "127.0.0.1");
    const text = head.includes("\r\n\r\n") ? head : `${head}\r\nConnection: close\r\n\r\n`;
    socket.end(Buffer.from(text, "latin1"));
    let answer = "";
    socket.setEncoding("latin1").on("data", (chunk) => (answer += chunk));
    await once(socket, "close");
    all.push(Number(/^HTTP\/1\.1 (\d+)/.exec(answer)?.[1]));
  }
  return all;
}

const get = (...headers) => ["GET / HTTP/1.1", "Host: a.test", ...headers].join("\r\n");
const at = (target) => `GET ${target} HTTP/1.1\r\nHost: a.test`;
const limit = (more) => ({ name: "one", rate: "1/day", algorithm: "sliding-log", ...more });
const byIp = { limits: [limit({ by: "ip" })] };
const trusting = { ...byIp, http: { trusted_proxies: ["127.0.0.1"] } };
const byHeader = (fact) => ({ http: { facts: { key: fact } }, limits: [limit({ by: "key" })] });

for (const [name, policy, heads, expected] of [
  ["forwarding headers of untrusted peers are ignored", byIp, [get("X-Forwarded-For: 192.0.2.1"), get("X-Forwarded-For: 192.0.2.2"), get("Forwarded: for=192.0.2.3")], [200, 429, 429]],
  ["leftmost X-Forwarded-For is ignored", trusting, [get("X-Forwarded-For: 198.51.100.1, 192.0.2.1"), get("X-Forwarded-For: 198.51.100.2, 192.0.2.1"), get("X-Forwarded-For: 192.0.2.2")], [200, 429, 200]],
  ["IPv4 and its mapped form share a count", trusting, [get("X-Forwarded-For: 192.0.2.1"), get("X-Forwarded-For: ::ffff:192.0.2.1"), get("X-Forwarded-For: ::ffff:192.0.2.2")], [200, 429, 200]],
  ["addresses of one IPv6 network share a count", trusting, [get("X-Forwarded-For: 2001:db8::1"), get("X-Forwarded-For: 2001:db8::2"), get("X-Forwarded-For: 2001:db8:0:1::1")], [200, 429, 200]],
  ["spellings of a path share a route", { http: { routes: ["/login"] }, limits: [limit({ when: { route: "/login" } })] }, ["/login", "/login/", "//login", "/./login", "/%6cogin", "/x/../login", "/login?a=1", "/login%2F", "/login;a=b"].map(at), [200, 429, 429, 429, 429, 429, 429, 429, 429]],
  ["duplicate identity header is refused", byHeader({ from: "header.x-key" }), [get("X-Key: a", "X-Key: b"), get("X-Key: a", "X_Key: b"), get("X-Key: a"), get("x-KEY: a")], [400, 400, 200, 429]],
  ["duplicate cookie is refused", byHeader({ from: "cookie.id" }), [get("Cookie: id=a; id=b"), get("Cookie: id=a", "Cookie: id=b"), get('Cookie: id="a"'), get("Cookie: id=a")], [400, 400, 200, 429]],
  ["duplicate field of a query is refused", byHeader({ from: "query.id" }), [at("/?id=a&id=b"), at("/?id=a"), at("/?i%64=%61")], [400, 200, 429]],
  ["bytes of a header are counted as sent", byHeader({ from: "header.x-key", hash: true }), [get("X-Key: caf\u00e9"), get("X-Key: caf\u00e9"), get("X-Key: caf\u00c3\u00a9")], [200, 429, 200]],
  ["spellings of a bearer token share a count", byHeader({ from: "header.authorization", strip: "Bearer ", hash: true }), [get("Authorization: Bearer t"), get("Authorization: bearer t")], [200, 429]],
  ["identity header counts only from trusted proxies", { ...byHeader({ from: "header.x-key", trusted: true }), limits: [limit({ by: "key", missing: "deny" })] }, [get("X-Key: a")], [429]],
  ["spellings of a host share a count", { limits: [limit({ by: "host" })] }, ["GET / HTTP/1.1\r\nHost: A.test", "GET / HTTP/1.1\r\nHost: a.test:80", "GET / HTTP/1.1\r\nHost: a.test."], [200, 429, 429]],
]) {
  test(name, async () => assert.deepEqual(await statuses(policy, heads), expected));
}

test("spellings of an email share a count", async () => {
  const policy = byHeader({ from: "body.email", normalize: ["lowercase", "trim", "nfkc"] });
  const post = (body) => `POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: ${body.length}\r\n\r\n${body}`;
  const heads = ["alice@a.test", "ALICE@a.test", " alice@a.test", "\\uff41lice@a.test", "bob@a.test"].map((email) => post(`{"email":"${email}"}`));
  assert.deepEqual(await statuses(policy, heads), [200, 429, 429, 429, 200]);
});

test("a body that no parser has read is a 500, never a pass", async () => {
  const app = express();
  const policy = byHeader({ from: "body.email" });
  app.use(tollkeeper(new Limiter(policy).on("error", () => {})));
  app.use((request, response) => response.end());
  app.use((error, request, response, next) => response.status(500).end(error.message));
  const answer = await fetch(await served(app), { method: "POST", body: '{"email":"a"}', headers: { "content-type": "application/json" } });
  assert.equal(answer.status, 500);
  assert.match(await answer.text(), /limit `one` needs `.*`.*: put express.json\(\) before tollkeeper\(\)/);
});

test("an application may name the client itself", async () => {
  const facts = (request) => ({ ip: request.get("x-real-ip") });
  const heads = [get("X-Real-IP: 192.0.2.1"), get("X-Real-IP: 192.0.2.1"), get("X-Real-IP: 192.0.2.2"), get("X-Real-IP: nowhere")];
  assert.deepEqual(await statuses(byIp, heads, { facts }), [200, 429, 200, 500]);
});
