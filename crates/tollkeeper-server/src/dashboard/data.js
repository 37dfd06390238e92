// Calls to the server, and the live data that all views share.
import { announce, by, clock, say, total } from "./dom.js";

const KEY = "tollkeeper-token";
const STEPS = 300;
let token = sessionStorage.getItem(KEY) ?? "";
/** @type {AbortController | null} */ let streaming = null;
let failures = 0, lostAt = 0;
/** @type {ReturnType<typeof setTimeout> | undefined} */ let reconnecting;
/** @type {ServerEvent | null} */ let counted = null;
/** @type {Set<() => void>} */ const listeners = new Set();
/** @type {() => void} */ let onSignedOut = () => {};

/** What is known now. */
export const live = {
	/** @type {ServerEvent | null} */ event: null,
	/** @type {Limits | null} */ limits: null,
	/** @type {TopKeys | null} */ top: null,
	/** @type {Past | null} The last five minutes. */ history: null,
	/** When the store stopped answering, by this page's clock. */ openSince: 0,
};

/** Calls the server. A 401 returns to the sign-in form. @param {string} method @param {string} path @param {unknown} [body] @param {Record<string, string>} [headers] @returns {Promise<Answer>} */
export async function call(method, path, body, headers = {}) {
	const sent = body === undefined ? undefined : typeof body === "string" ? body : JSON.stringify(body);
	try {
		const response = await request(method, path, sent, headers);
		const text = await response.text();
		const data = text.startsWith("{") ? JSON.parse(text) : null;
		if (response.status === 401) signOut("The server did not accept this token.");
		return { status: response.status, data, message: data?.error?.message ?? `the server answered ${response.status}` };
	} catch (error) {
		return { status: 0, data: null, message: `no connection to the server (${error instanceof Error ? error.message : error})` };
	}
}

function request(method, path, body, headers = {}, signal) {
	if (token) headers = { ...headers, authorization: `Bearer ${token}` };
	return fetch(path, { method, body, headers, cache: "no-store", redirect: "error", signal });
}

/** Whether the server shows its data with this token: 200, 401 or 0. @param {string} tried @param {boolean} stay */
export async function signIn(tried, stay) {
	const before = token;
	token = tried;
	const { status } = await request("GET", "v1/top").catch(() => ({ status: 0 }));
	if (status === 401) token = before;
	else if (stay && tried) sessionStorage.setItem(KEY, tried);
	return status;
}

export function signOut(why = "") {
	token = "";
	sessionStorage.removeItem(KEY);
	stop();
	Object.assign(live, { event: null, limits: null, top: null, history: null });
	say(by("sign-in-error"), why);
	onSignedOut();
}

export function signedIn() {
	return token !== "";
}

export function whenSignedOut(listener) {
	onSignedOut = listener;
}

/** Calls `listener` after each event, until the returned function is called. @param {() => void} listener */
export function follow(listener) {
	listeners.add(listener);
	return () => listeners.delete(listener);
}

export async function history(span) {
	const { status, data } = await call("GET", `v1/history?span=${span}`);
	if (status !== 200) return null;
	const rows = (of, names) => names.map((name) => of[name]);
	const limits = Object.entries(data.limits).map(([name, of]) => /** @type {[string, Rows]} */ ([name, rows(of, ["allowed", "refused", "would_refuse"])]));
	return { step: data.step, until: data.until, requests: rows(data.requests, ["allowed", "refused", "degraded"]), limits: new Map(limits) };
}

/** Reads the active limits. */
export async function readLimits() {
	const { status, data } = await call("GET", "v1/limits");
	if (status === 200) live.limits = data;
}

export async function readTop() {
	const { status, data } = await call("GET", "v1/top");
	if (status === 200) live.top = data;
}

/** Reads the event stream until the page is hidden. */
export async function start() {
	if (streaming || document.hidden) return;
	const mine = (streaming = new AbortController());
	try {
		const response = await request("GET", "v1/events", undefined, {}, mine.signal);
		if (response.status === 401) return signOut("The server did not accept this token.");
		if (!response.ok || !response.body) throw new Error(String(response.status));
		live.history = null;
		const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
		let text = "";
		for (;;) {
			const { done, value } = await reader.read();
			if (done) break;
			text += value;
			const parts = text.split("\n\n");
			text = parts.pop() ?? "";
			for (const part of parts) if (part.startsWith("data: ")) await receive(JSON.parse(part.slice(6)));
		}
	} catch {
		// The connection ended; it is opened again below.
	}
	if (streaming !== mine) return;
	streaming = null;
	lostAt ||= Date.now();
	if (failures > 0) announce("no connection to the server");
	reconnecting = setTimeout(start, 1000 * Math.min(30, 2 ** failures++));
	showBanner();
}

/** Stops reading events. */
export function stop() {
	clearTimeout(reconnecting);
	streaming?.abort();
	streaming = null;
}

async function receive(sent) {
	const event = /** @type {ServerEvent} */ ({ ...sent, limits: new Map(Object.entries(sent.limits)) });
	[failures, lostAt] = [0, 0];
	const before = live.event;
	const restarted = counted !== null && asked(event) < asked(counted);
	if (!live.history || restarted) {
		const read = await history("5m");
		if (!read) return;
		live.history = read;
		counted = null;
	}
	if (!before || restarted || before.version !== event.version || before.shadowed !== event.shadowed || before.source !== event.source) await readLimits();
	if (before && before.store.state !== event.store.state) announce(`store ${event.store.state}`);
	live.openSince = event.store.state === "ok" ? 0 : live.openSince || Date.now();
	add(live.history, event);
	[counted, live.event] = [event, event];
	showBanner();
	for (const listener of listeners) listener();
}

function asked(event) {
	return total(Object.values(event.requests));
}

/** Adds what was counted since the last event to the history, unless the server's history had it already. @param {Past} to @param {ServerEvent} event */
export function add(to, event) {
	if (event.t + 1 <= to.until || !counted) {
		if (event.t + 1 > to.until) shift(to, event.t);
		return;
	}
	shift(to, event.t);
	const last = STEPS - 1;
	const { requests, limits } = counted;
	[event.requests.allowed - requests.allowed, event.requests.refused - requests.refused, event.requests.degraded - requests.degraded]
		.forEach((more, kind) => (to.requests[kind][last] = more));
	for (const [name, now] of event.limits) {
		const then = limits.get(name);
		const rows = to.limits.get(name) ?? [0, 1, 2].map(() => new Array(STEPS).fill(0));
		to.limits.set(name, rows);
		[now.allowed - (then?.allowed ?? 0), now.refused - (then?.refused ?? 0), now.would_refuse - (then?.would_refuse ?? 0)]
			.forEach((more, kind) => (rows[kind][last] = more));
	}
}

/** Moves the history forward so that its last step begins at `t`. @param {Past} to @param {number} t */
function shift(to, t) {
	const steps = Math.min(STEPS, t + 1 - to.until);
	for (const rows of [to.requests, ...to.limits.values()]) {
		for (const row of rows) {
			for (let step = 0; step < steps; step++) {
				row.shift();
				row.push(0);
			}
		}
	}
	to.until = t + 1;
}

/** Asked and refused per second over the last ten seconds. @param {Rows | undefined} rows */
export function rates(rows) {
	if (!rows) return { asked: 0, refused: 0 };
	const sum = (row) => total(row.slice(-10)) / 10;
	const refused = sum(rows[1]) + sum(rows[2]);
	return { asked: sum(rows[0]) + refused, refused };
}

/** Shows since when there is no connection. */
export function showBanner() {
	const banner = by("banner");
	banner.hidden = !lostAt || document.hidden || by("nav").hidden;
	if (lostAt) say(banner, `no connection for ${Math.round((Date.now() - lostAt) / 1000)} s${live.event ? `; numbers are of ${clock(live.event.t)}` : ""}`);
}
