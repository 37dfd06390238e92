// Prints how Express parses a request.
import { createRequire } from "node:module";
import { join } from "node:path";

const load = createRequire(join(process.cwd(), "package.json"));
const express = load("express");
const app = express();
// Express 4 parses queries with `qs` by default, Express 5 does so if configured.
app.set("query parser", process.env.QUERY_PARSER ?? "simple");
app.use(load("cookie-parser")(), express.json(), express.urlencoded({ extended: true }));

const say = (route) => (request, response) => {
  response.json({
    route,
    path: request.path,
    key: request.get("x-api-key") ?? null,
    authorization: request.get("authorization") ?? null,
    session: request.cookies.sid ?? null,
    user: request.query.user ?? null,
    email: request.body?.email ?? null,
    host: request.hostname ?? null,
  });
};
app.all("/login", say("/login"));
app.get("/api/login", say("/api/login"));
app.get("/users/:id", say("/users/{id}"));
app.get("/users/:id/export", say("/users/{id}/export"));
app.get("/projects/:id", say("/projects/{id}"));
app.get("/files/*rest", say("/files/*"));
app.listen(process.env.PORT, "127.0.0.1");
