// The example for `ws`: a handshake is decided like a request, and the connection holds its slot.

import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer } from "node:http";
import { after, test } from "node:test";
import { WebSocket, WebSocketServer } from "ws";
import { Limiter } from "tollkeeper";
import { until } from "./helper.mjs";

const limits = [{ name: "sockets", by: "ip", algorithm: "concurrency", limit: 2 }];

test("open sockets hold slots, refused handshakes get 429", async () => {
  const limiter = new Limiter({ limits });
  const sockets = new WebSocketServer({ noServer: true });
  const server = createServer();
  server.on("upgrade", async (request, socket, head) => {
    const visit = await limiter.visit(request);
    if (!visit.allowed) {
      const headers = Object.entries(visit.headers).map(([name, value]) => `${name}: ${value}\r\n`);
      socket.end(`HTTP/1.1 ${visit.status} Refused\r\n${headers.join("")}connection: close\r\n\r\n${visit.body}`);
      return;
    }
    socket.once("close", () => visit.gone());
    sockets.handleUpgrade(request, socket, head, (client) => client.on("message", (text) => client.send(text)));
  });
  after(() => server.close());
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  const url = `ws://127.0.0.1:${server.address().port}/`;

  const open = async () => {
    const client = new WebSocket(url);
    return new Promise((resolve) => {
      client.on("open", () => resolve(client));
      client.on("error", (error) => resolve(error.message));
    });
  };
  const [first, second] = [await open(), await open()];
  assert.equal(await open(), "Unexpected server response: 429");
  first.send("hello");
  assert.equal(String((await once(first, "message"))[0]), "hello");
  first.terminate();
  let third;
  await until(async () => typeof (third = await open()) !== "string");
  for (const client of [second, third]) client.terminate();
});
