// Prints how Fastify parses a request.
import { createRequire } from "node:module";
import { join } from "node:path";

const load = createRequire(join(process.cwd(), "package.json"));
const app = load("fastify")();
app.register(load("@fastify/cookie"));

const say = (route) => async (request) => ({
  route,
  path: request.url.split("?")[0],
  key: request.headers["x-api-key"] ?? null,
  authorization: request.headers.authorization ?? null,
  session: request.cookies.sid ?? null,
  user: request.query.user ?? null,
  email: request.body?.email ?? null,
  host: request.hostname ?? null,
});
app.get("/login", say("/login"));
app.post("/login", say("/login"));
app.get("/api/login", say("/api/login"));
app.get("/users/:id", say("/users/{id}"));
app.get("/users/:id/export", say("/users/{id}/export"));
app.get("/projects/:id", say("/projects/{id}"));
app.get("/files/*", say("/files/*"));
await app.listen({ port: Number(process.env.PORT), host: "127.0.0.1" });
