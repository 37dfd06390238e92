// Prints how a Node.js application without a framework parses a request: it routes by `new URL`.
import { createServer } from "node:http";

const ROUTES = [
  ["/login", /^\/login\/?$/],
  ["/api/login", /^\/api\/login\/?$/],
  ["/users/{id}", /^\/users\/[^/]+$/],
  ["/users/{id}/export", /^\/users\/[^/]+\/export$/],
  ["/projects/{id}", /^\/projects\/[^/]+$/],
  ["/files/*", /^\/files\//],
];

createServer((request, response) => {
  let url;
  try {
    url = new URL(request.url, "http://localhost");
  } catch {
    return response.writeHead(400).end();
  }
  const route = ROUTES.find(([, pattern]) => pattern.test(url.pathname))?.[0] ?? null;
  const said = {
    route,
    path: url.pathname,
    key: request.headers["x-api-key"] ?? null,
    authorization: request.headers.authorization ?? null,
    session: null,
    user: url.searchParams.get("user"),
    host: request.headers.host ?? null,
  };
  response.writeHead(route ? 200 : 404, { "content-type": "application/json" }).end(JSON.stringify(said));
}).listen(process.env.PORT, "127.0.0.1");
