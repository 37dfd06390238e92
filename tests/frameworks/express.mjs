// Says how Express reads a request.
import { createRequire } from "node:module";
import { join } from "node:path";

const load = createRequire(join(process.cwd(), "package.json"));
const express = load("express");
const app = express();
app.use(load("cookie-parser")());

const say = (route) => (request, response) => {
  response.json({
    route,
    path: request.path,
    key: request.get("x-api-key") ?? null,
    authorization: request.get("authorization") ?? null,
    session: request.cookies.sid ?? null,
    user: request.query.user ?? null,
    host: request.hostname ?? null,
  });
};
app.get("/login", say("/login"));
app.get("/api/login", say("/api/login"));
app.get("/users/:id", say("/users/{id}"));
app.get("/users/:id/export", say("/users/{id}/export"));
app.get("/projects/:id", say("/projects/{id}"));
app.get("/files/*rest", say("/files/*"));
app.listen(process.env.PORT, "127.0.0.1");
