// Usage examples that `tsc --noEmit` checks against the handwritten types.

import express from "express";
import fastify from "fastify";
import { Hono } from "hono";
import { rateLimit } from "express-rate-limit";
import { Decision, Limiter, TollkeeperError, type LimitState, type Slot } from "tollkeeper";
import { tollkeeper as onExpress } from "tollkeeper/express";
import onFastify from "tollkeeper/fastify";
import { limits, withLimits } from "tollkeeper/fetch";
import { tollkeeper as onHono } from "tollkeeper/hono";
import { TollkeeperStore } from "tollkeeper/express-rate-limit";
import { testing } from "tollkeeper/testing";

const file = new Limiter({ config: "tollkeeper.yaml", store: "redis://127.0.0.1/" });
const limiter = new Limiter({
  limits: [{ name: "per-user", by: "user", rate: "100/min", burst: 20 }],
  store: "memory://",
  http: { trusted_proxies: ["10.0.0.0/8"] },
  headers: ["ietf"],
});
new Limiter({ server: "http://127.0.0.1:8080", token: "secret", timeout: 200, onUnavailable: "deny" });
// @ts-expect-error a limiter has no server, no config and no limits
new Limiter({ store: "memory://" });
// @ts-expect-error the policy has another name
new Limiter({ server: "http://127.0.0.1:8080", onUnavailable: "open" });

const facts = { user: "alice", paid: true, plan: 3, big: 3n, none: undefined };
const decision: Decision = await limiter.check(facts, { cost: 2 });
const remaining: number | null = decision.remaining;
const wait: number = decision.allowed ? decision.delay : (decision.retryAfter ?? Infinity);
const headers: Record<string, string> = decision.headers();
const states: LimitState[] = decision.limits;
// @ts-expect-error null is not a fact
await limiter.check({ user: null });
// @ts-expect-error an object is not a fact
await limiter.check({ user: { id: 7 } });
// @ts-expect-error a cost is a number
await limiter.check({ user: "alice" }, { cost: "2" });
limiter.checkSync({ user: "alice" }).allowed satisfies boolean;
(await limiter.usage({ user: "alice" })).map((limit) => limit.resetAfter) satisfies (number | null)[];
(await limiter.explain({ user: "alice" })).filter((limit) => limit.applies);

const reserved = await limiter.reserve({ user: "alice", tokens: 4000 }, { ttl: "60s" });
if (reserved.charge !== null) {
  (await limiter.settle(reserved.charge, { facts: { tokens: 1234 } })) satisfies boolean;
  await limiter.refund(reserved.charge, { cost: 1 });
}
await limiter.forget("per-user", { user: "alice" });
const { slot }: { slot: Slot | null } = await limiter.acquire({ user: "alice" });
await slot?.renew();
await slot?.release();
await limiter.untilAllowed({ user: "alice" }, { timeout: 1000, signal: AbortSignal.timeout(5000) });
limiter.policy.limits[0]?.name satisfies string | undefined;
limiter.on("reload", (version) => version.toFixed()).on("error", (error) => error.message);
// @ts-expect-error there is no such event
limiter.on("refused", () => {});

try {
  await file.check({ user: "" });
} catch (error) {
  if (error instanceof TollkeeperError) [error.code, error.message, error.where];
}
await file.close();

const app = express();
app.use(onExpress(limiter));
app.use(
  onExpress<express.Request, express.Response>(limiter, {
    facts: async (request) => ({ ip: request.ip, user: request.get("x-user") }),
    cost: (request) => Number(request.query.cost ?? 1),
    skip: (request) => request.path === "/healthz",
    onRefused: (request, response, decision) => response.status(429).json({ wait: decision.retryAfter }),
    onError: (error, request, response, next) => next(error),
  }),
);
// @ts-expect-error the option is called `facts`
app.use(onExpress(limiter, { keyGenerator: () => "alice" }));

const server = fastify();
await server.register(onFastify, { limiter, hook: "preHandler", facts: () => ({ user: "alice" }) });
const hono = new Hono();
hono.use(onHono(limiter, { ip: (context) => context.req.header("cf-connecting-ip") }));
const ip = () => "192.0.2.7";
export const POST = withLimits(limiter, async (request) => Response.json(await request.json()), { ip });
type Context = { params: Promise<{ id: string }> };
export const GET = withLimits(limiter, (request: Request, context: Context) => Response.json(context));
const entered = await limits(limiter)(new Request("http://a/"));
entered.response ?? entered.finish(new Response("hello"));

const store = new TollkeeperStore({ store: "redis://127.0.0.1/", prefix: "rl" });
app.use(rateLimit({ windowMs: 1000, limit: 5, store }));

const { limiter: tested, clock } = testing({ limits: [{ name: "a", rate: "1/s" }], at: 0 });
tested.checkSync({});
clock.advance(0.6);
clock.now satisfies number;

export { headers, remaining, states, wait };
