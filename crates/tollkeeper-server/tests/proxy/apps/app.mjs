// An Express application with WebSockets, as the tests of the proxy need it.
import http from "node:http";
import express from "express";
import { WebSocketServer } from "ws";

const app = express();
app.get("/hello", (request, response) => response.json({ host: request.headers.host, via: request.headers["x-forwarded-for"] }));
app.get("/empty", (request, response) => response.status(204).end());
app.get("/events", (request, response) => {
  response.set("content-type", "text/event-stream").flushHeaders();
  // The second event is sent only when the first has arrived, and the client has said so.
  response.write("data: first\n\n");
  waiting = () => response.end("data: second\n\n");
});
let waiting;
app.post("/seen", (request, response) => { waiting(); response.end(); });
app.post("/echo", (request, response) => request.pipe(response));
const server = http.createServer(app);
const sockets = new WebSocketServer({ server });
sockets.on("connection", (socket) => socket.on("message", (data, binary) => socket.send(data, { binary })));
server.listen(0, "127.0.0.1", () => console.log(server.address().port));
