// The views. Each returns its title and element, and redraws in `update` after an event.
import { chart, histogram, sparkline } from "./chart.js";
import { call, history, live, rates, readLimits } from "./data.js";
import { confirmed, count, duration, h, keyText, meter, percent, rate, row, say, table, time, value } from "./dom.js";

const LIMIT_KINDS = [["allowed", "allowed"], ["refused", "refused"], ["would refuse", "would"]];
const REQUEST_KINDS = [["allowed", "allowed"], ["refused", "refused"], ["degraded", "degraded"]];

/** What a limit grants, as written. @param {Limit} limit */
function quota(limit) {
	if (limit.rate) return limit.burst === undefined ? limit.rate : `${limit.rate}, burst ${limit.burst}`;
	return limit.limit === undefined ? `by ${limit.tier ?? "tier"}` : `${limit.limit} slots`;
}

function limitLink(name) {
	return h("a", { href: `#/limits/${encodeURIComponent(name)}` }, value(name, 40));
}

/** @param {string} text @param {() => void} click @param {string} [kind] */
function button(text, click, kind) {
	return h("button", { type: "button", class: kind, click }, text);
}

/** A field without help from the browser. @param {Attributes} more */
function input(more) {
	return /** @type {HTMLInputElement} */ (h("input", { autocomplete: "off", spellcheck: "false", ...more }));
}

/** A block of text that can be scrolled. @param {string} text @param {string} [kind] */
function block(text, kind = "") {
	return h("pre", { class: `out ${kind}`, tabindex: 0 }, text);
}

/** A paragraph for results of actions. */
function result() {
	const element = h("p", { role: "alert" });
	const show = (text, good) => {
		element.className = good ? "good" : "bad";
		say(element, text);
	};
	return { element, say: show };
}

/** A chart over 5 min, 1 h or 24 h. @param {string} title @param {boolean} stacked @param {(of: Past) => Rows | undefined} pick @param {() => string[][]} kinds */
function timed(title, stacked, pick, kinds) {
	const drawn = chart(title, stacked);
	let span = "5m";
	/** @type {Past | null} */ let longer = null;
	let readAt = 0;
	const spans = h("fieldset", { class: "spans" }, h("legend", { class: "unseen" }, `${title}: time span`),
		[["5m", "5 min"], ["1h", "1 h"], ["24h", "24 h"]].map(([id, name]) => h("label", {},
			h("input", { type: "radio", name: "span", value: id, checked: id === span, change: () => { span = id; readAt = 0; update(); } }), ` ${name}`)));
	async function update() {
		if (span !== "5m" && Date.now() - readAt > 10000) {
			readAt = Date.now();
			const asked = span;
			const read = await history(span);
			if (asked !== span) return;
			longer = read;
		}
		const from = span === "5m" ? live.history : longer;
		const rows = from && pick(from);
		if (from && rows) drawn.update({ step: from.step, until: from.until, series: kinds().map(([name, kind], i) => ({ name, kind, counts: rows[i] })) });
	}
	return { element: h("div", {}, h("div", { class: "bar-row" }, h("h2", {}, title), spans), drawn.element), update };
}

/** Tiles of a name, a number and words. */
function tiles() {
	const element = h("div", { class: "tiles" });
	/** @type {Map<string, HTMLElement[]>} */ const parts = new Map();
	function tile(name, big, small, alarm = false) {
		const made = parts.get(name) ?? [h("b"), h("small")];
		if (!parts.has(name)) element.append(h("div", { class: "card tile" }, name, made));
		parts.set(name, made);
		say(made[0], big);
		say(made[1], small);
		made[0].parentElement?.classList.toggle("alarm", alarm);
	}
	return { element, tile };
}

/** @returns {View} */
export function nowView() {
	const { element: top, tile } = tiles();
	const requests = timed("Requests per second", true, (of) => of.requests, () => REQUEST_KINDS);
	const limits = table("Rates over the last 10 s", [["Limit"], ["Mode"], ["Quota", "mid"], ["Asked/s", "num"], ["Refused/s", "num"], ["Refused", "num mid"], ["Last minute", "wide"], ["Starved keys", "num wide"]], []);
	const body = /** @type {HTMLElement} */ (limits.lastChild);
	const keys = h("div");
	/** @type {Map<string, ReturnType<typeof makeRow>>} */ const rows = new Map();

	function makeRow(limit) {
		const cells = { mode: h("span"), quota: h("span"), asked: h("span"), refused: h("span"), share: h("span"), starved: h("span") };
		const line = sparkline();
		const element = row([[limitLink(limit.name)], [cells.mode], [cells.quota, "mid"], [cells.asked, "num"], [cells.refused, "num"], [cells.share, "num mid"], [line.element, "wide"], [cells.starved, "num wide"]]);
		return { element, cells, line };
	}

	function update() {
		const { event, limits: active, history: of } = live;
		if (!event || !active || !of) return;
		const { allowed, refused, degraded } = event.requests;
		const total = allowed + refused + degraded;
		const lately = rates(of.requests.map((it, kind) => (kind === 2 ? it.map(() => 0) : it)));
		tile("Refused", percent(lately.refused, lately.asked), `of ${rate(lately.asked)} requests/s in the last 10 s`);
		tile("Requests", count(total), `${count(allowed)} allowed, ${count(refused)} refused, ${count(degraded)} degraded`, degraded > 0 && event.store.state !== "ok");
		const p99 = event.store.p99_ms === null ? "in this process" : `p99 up to ${event.store.p99_ms} ms`;
		tile("Store", event.store.state, event.store.state === "ok" ? p99 : `${event.store.state} since ${duration((Date.now() - live.openSince) / 1000)}, ${p99}`, event.store.state !== "ok");
		tile("Keys", count(event.keys), `of ${count(event.max_keys)} in this process`, event.keys >= event.max_keys);
		const file = event.error ? `the file was not loaded: ${event.error.split("\n")[0]}` : event.shadowed ? "shadowed: the file has other limits" : `from ${event.source}`;
		tile("Policy", `version ${event.version}`, file, event.error !== null);
		const up = event.upstream, out = up?.addresses.filter((it) => it.ejected).length;
		if (up) tile("Upstream", `${count(up.in_flight)} in flight`, `at most ${count(up.limit)}, ${count(up.shed)} shed, ${count(up.errors)} errors, ${out} of ${up.addresses.length} addresses ejected`, !!out);
		requests.update();
		for (const [name, made] of rows) if (!active.limits.some((limit) => limit.name === name)) { made.element.remove(); rows.delete(name); }
		active.limits.forEach((limit, index) => {
			const made = rows.get(limit.name) ?? makeRow(limit);
			rows.set(limit.name, made);
			if (body.children[index] !== made.element) body.insertBefore(made.element, body.children[index] ?? null);
			const series = of.limits.get(limit.name);
			const { asked, refused } = rates(series);
			say(made.cells.mode, limit.mode);
			say(made.cells.quota, quota(limit));
			say(made.cells.asked, rate(asked));
			say(made.cells.refused, limit.mode === "shadow" && refused ? `would ${rate(refused)}` : rate(refused));
			say(made.cells.share, percent(refused, asked));
			say(made.cells.starved, count(event.limits.get(limit.name)?.starved ?? 0));
			made.line.update(series ? series[1].slice(-60).map((n, i) => (n ?? 0) + (series[2].slice(-60)[i] ?? 0)) : []);
		});
		keys.replaceChildren(topKeys("Most refused keys", live.top?.refused.slice(0, 10) ?? [], true));
	}
	return { title: "Now", element: h("div", {}, h("h1", {}, "Now"), top, requests.element, h("h2", {}, "Limits"), limits, keys), update };
}

/** @param {string} title @param {TopKey[]} rows @param {boolean} [named] whether to show the limit */
function topKeys(title, rows, named = false) {
	return h("div", {}, h("h2", {}, title), !rows.length ? h("p", { class: "hint" }, "None in the last 5 to 10 minutes.") : table("Counts of the last 5 to 10 minutes", named ? [["Key"], ["Limit"], ["Times", "num"]] : [["Key"], ["Times", "num"]], rows.map((it) => row([
		[it.ref ? h("a", { href: `#/key/${it.ref}` }, value(keyText(it.key))) : value(keyText(it.key))], ...(named ? [/** @type {[Child]} */ ([limitLink(it.limit)])] : []),
		[it.error ? `at least ${count(it.count)}, at most ${count(it.error)} more` : count(it.count), "num"]]))));
}

export function upstreamView() {
	const { element: top, tile } = tiles();
	const about = h("p"), list = h("div");
	function update() {
		const up = live.event?.upstream;
		if (!up) return say(about, live.event ? "This server is not a proxy." : "");
		say(about, up.url);
		tile("In flight", count(up.in_flight), `at most ${count(up.limit)}`, up.in_flight >= up.limit);
		tile("Waiting", count(up.waiting), "for a slot");
		tile("Floor", up.floor_ms === null ? "–" : `${up.floor_ms} ms`, "response time without a queue, if the limit is adaptive");
		tile("Shed", count(up.shed), "refused at the limit, since the start");
		tile("Errors", count(up.errors), "since the start");
		list.replaceChildren(table("Addresses, errors since the start", [["Address"], ["In flight", "num"], ["Errors", "num"], ["State"]], up.addresses.map((it) => row([
			[value(it.address)], [count(it.in_flight), "num"], [count(it.errors), "num"], [h("span", { class: it.ejected ? "bad" : "good" }, it.ejected ? "ejected" : "in use")]]))));
	}
	return { title: "Upstream", element: h("div", {}, h("h1", {}, "Upstream"), about, top, list), update };
}

export function limitView(name) {
	const shadow = () => live.limits?.limits.find((limit) => limit.name === name)?.mode === "shadow";
	const counts = timed("Decisions per second", false, (of) => of.limits.get(name), () => LIMIT_KINDS);
	const left = histogram();
	const about = h("p"), totals = h("p", { id: "totals" }), compare = h("p"), busiest = h("div"), refused = h("div");
	function update() {
		const limit = live.limits?.limits.find((it) => it.name === name);
		const event = live.event?.limits.get(name);
		say(about, limit ? `${quota(limit)} by ${limit.by.join(", ") || "nothing: one for all"} · ${limit.algorithm} · ${limit.mode}` : live.limits ? "This limit is not active." : "");
		if (!event) return;
		const asked = event.allowed + event.refused + event.would_refuse;
		say(totals, `Since the start: ${count(event.allowed)} allowed, ${count(event.refused)} refused, ${count(event.would_refuse)} would refuse, ${count(event.skipped)} skipped, ${count(event.fallback)} decided without the store, ${count(event.starved)} starved keys.`);
		if (shadow()) {
			const all = live.event?.requests;
			compare.replaceChildren(`In shadow mode: it would have refused ${percent(event.would_refuse, asked)} of the ${count(asked)} requests it was asked about; the enforced limits refused ${percent(all?.refused ?? 0, (all?.allowed ?? 0) + (all?.refused ?? 0))} of all. `,
				h("a", { href: `#/policy?enforce=${encodeURIComponent(name)}` }, "Turn to enforce"), " fills the editor and changes nothing yet.");
		} else compare.replaceChildren();
		counts.update();
		left.update(event.remaining);
		const of = (all) => (all ?? []).filter((it) => it.limit === name).slice(0, 15);
		refused.replaceChildren(shadow() ? topKeys("Keys it would refuse", of(live.top?.would_refuse)) : topKeys("Most refused keys", of(live.top?.refused)));
		busiest.replaceChildren(topKeys("Busiest keys", of(live.top?.busiest)));
	}
	return { title: name, element: h("div", {}, h("p", {}, h("a", { href: "#/" }, "All limits")), h("h1", {}, "Limit ", value(name, 64)), about, totals, compare,
		h("div", { class: "two" }, counts.element, h("div", {}, h("h2", {}, "What was left"), left.element)), h("div", { class: "two" }, refused, busiest)), update };
}

/** `user=alice plan=pro` as facts; in a value, `+` is a space. @param {string} text */
function parseFacts(text) {
	return [...new URLSearchParams(text.trim().replace(/\s+/g, "&"))];
}

function shell(text) {
	return `'${text.replaceAll("'", "'\\''")}'`;
}

/** When a limit admits requests, counting down. @param {any} it */
function admits(it) {
	if (it.allowed) return h("span", { class: "good" }, "now");
	if (it.never || it.retry_after === null) return h("span", { class: "bad" }, "never");
	return h("span", { class: "bad", "data-until": Date.now() + it.retry_after * 1000 }, `in ${duration(it.retry_after)}`);
}

/** Redraws what counts down. @param {ParentNode} within */
function countDown(within) {
	for (const element of within.querySelectorAll("[data-until]")) {
		const left = (Number(element.getAttribute("data-until")) - Date.now()) / 1000;
		element.className = left > 0 ? "bad" : "good";
		say(element, left > 0 ? `in ${duration(left)}` : "now");
	}
}

function overrideNote(it) {
	return it.override ? h("span", { class: "tag" }, it.override.until ? ["override until ", time(it.override.until, true)] : "override") : null;
}

/** Buttons for one key of a limit. @param {any} it @param {string} path @param {ReturnType<typeof result>} out @param {() => void} after */
function keyButtons(it, path, out, after) {
	const curl = `curl -X DELETE -H "Authorization: Bearer $TOKEN" ${shell(`${new URL(".", location.href).href}v1/state?${path}`)}`;
	const copied = button("Copy curl", async () => {
		await navigator.clipboard?.writeText(curl).catch(() => {});
		out.say(`Copied: ${curl}`, true);
	});
	const override = it.key.length === 1 && it.key[0] !== null ? h("a", { class: "button", href: `#/overrides?${new URLSearchParams({ limit: it.name, value: it.key[0] })}` }, "Override") : null;
	return h("span", {}, button("Unblock", async () => {
		if (!await confirmed(`Forget what ${keyText(it.key)} has used of ${it.name}?`, "Unblock")) return;
		const { status, data, message } = await call("DELETE", `v1/state?${path}`);
		if (status !== 200) return out.say(message, false);
		out.say(data.done ? `Unblocked ${keyText(it.key)} under ${it.name}.` : "There was nothing to forget.", true);
		after();
	}, "danger"), " ", override, " ", copied);
}

export function keyView(ref, parameters) {
	const out = result(), found = h("div");
	const field = input({ id: "facts", size: 40, value: [...parameters].map(([name, it]) => `${name}=${it.replace(/[%&+]/g, encodeURIComponent).replaceAll(" ", "+")}`).join(" "), placeholder: "user=alice route=/login" });
	const form = h("form", { class: "fields", submit: (event) => {
		event.preventDefault();
		const facts = parseFacts(field.value);
		if (!facts.length) return out.say("Type facts such as user=alice.", false);
		const to = `#/key?${new URLSearchParams(facts)}`;
		if (location.hash === to) look();
		else location.hash = to;
	} }, h("label", {}, "Facts of a request", field), h("button", { class: "primary" }, "Look up"));

	async function byRef() {
		const { status, data, message } = await call("GET", `v1/state?ref=${encodeURIComponent(ref)}`);
		if (status !== 200) return out.say(message, false);
		if (!data.limits.length) return found.replaceChildren(h("p", {}, "Nothing is stored for this key: it has its full quota."));
		found.replaceChildren(h("h2", {}, "Key ", value(keyText(data.limits[0].key), 64)), table("What is stored for this key", [["Limit"], ["Left"], ["Of", "num mid"], ["Admits requests"], ["Full again", "mid"], ["Actions"]],
			data.limits.map((it) => row([[[limitLink(it.name), it.tier ? ` ${it.tier}` : null, " ", overrideNote(it)]], [[count(it.remaining ?? 0), meter(it.remaining, it.limit)]], [count(it.limit), "num mid"],
				[admits(it)], [it.reset_after === null ? "–" : `in ${duration(it.reset_after)}`, "mid"], [keyButtons(it, `ref=${encodeURIComponent(ref)}`, out, byRef)]]))));
	}

	async function byFacts() {
		const facts = Object.fromEntries(parameters);
		const [explained, peeked] = await Promise.all([call("POST", "v1/explain", { facts }), call("POST", "v1/peek", { facts })]);
		if (explained.status !== 200) return out.say(explained.message, false);
		if (peeked.status !== 200) out.say(peeked.message, false);
		const says = new Map((peeked.data?.limits ?? []).map((it) => [it.name, it]));
		found.replaceChildren(
			h("p", { class: peeked.data?.allowed ? "good" : "bad" }, peeked.status !== 200 ? "" : peeked.data.allowed ? "A request with these facts would be admitted now." : `A request with these facts would be refused: ${peeked.data.reason}.`),
			table("Each limit: whether it applies, and what it says", [["Limit"], ["Why"], ["Left"], ["Admits requests", "mid"], ["Actions"]], explained.data.limits.map((it) => {
				const state = says.get(it.name);
				const path = String(new URLSearchParams({ ...facts, limit: it.name }));
				return row([[[limitLink(it.name), " ", it.mode === "shadow" ? h("span", { class: "tag" }, "shadow") : null]], [it.why],
					[state ? [`${count(state.remaining ?? 0)} of ${count(state.limit)} `, overrideNote(state), meter(state.remaining, state.limit)] : "–"], [state ? admits(state) : "–", "mid"],
					[state ? keyButtons(state, path, out, byFacts) : null]]);
			})));
	}

	function look() {
		out.say("", true);
		if (ref) byRef();
		else if ([...parameters].length) byFacts();
	}
	look();
	return { title: "Key", element: h("div", {}, h("h1", {}, "Key"), form, out.element, found), tick: () => countDown(found) };
}

export function tryView(parameters) {
	const out = result(), found = h("div"), rows = h("div");
	const cost = input({ type: "number", min: 1, value: 1 });
	const known = h("datalist", { id: "fact-names" });
	function addRow(name, it) {
		const fields = h("div", { class: "fields" }, h("label", {}, "Fact", input({ list: "fact-names", value: name })),
			h("label", {}, "Value", input({ value: it })),
			h("button", { type: "button", "aria-label": "Remove this fact", click: () => fields.remove() }, "Remove"));
		rows.append(fields);
	}
	const facts = () => [...rows.children].map((it) => [...it.querySelectorAll("input")].map((field) => field.value)).filter(([name, it]) => name && it);
	async function ask(charging) {
		const sent = Object.fromEntries(facts());
		// The address follows the facts, so that it can be shared.
		window.history.replaceState(null, "", `#/try?${new URLSearchParams(sent)}`);
		out.say("", true);
		const body = { facts: sent, cost: Number(cost.value) };
		const [explained, decided] = await Promise.all([charging ? null : call("POST", "v1/explain", { facts: sent }), call("POST", charging ? "v1/check" : "v1/peek", body)]);
		if (decided.status !== 200 && decided.status !== 429) return out.say(decided.message, false);
		const it = decided.data;
		out.say(`${charging ? "" : "Would be "}${it.allowed ? "allowed" : `refused: ${it.reason}`}${it.allowed && !it.limits.length ? ": no limit applies" : ""}${charging && it.allowed ? " and charged" : ""}.`, it.allowed);
		const says = (limit) => (limit.allowed ? "allowed" : limit.mode === "shadow" ? "would refuse" : "refused");
		found.replaceChildren(
			table("What each limit says", [["Limit"], ["Key", "mid"], ["Says"], ["Cost", "num mid"], ["Left", "num"], ["Of", "num"], ["Admits requests", "mid"]], it.limits.map((limit) => row([
				[[limitLink(limit.name), " ", overrideNote(limit)]], [value(keyText(limit.key)), "mid"], [says(limit)], [count(limit.cost), "num mid"], [limit.remaining === null ? "–" : count(limit.remaining), "num"], [count(limit.limit), "num"], [admits(limit), "mid"]]))),
			explained?.data?.limits ? table("Which limits apply", [["Limit"], ["Why"]], explained.data.limits.map((limit) => row([[limitLink(limit.name)], [limit.why]]))) : "",
			h("details", {}, h("summary", {}, "As JSON"), block(JSON.stringify(it, null, 2))));
	}
	const form = h("form", { submit: (event) => { event.preventDefault(); ask(false); } }, rows, known,
		h("div", { class: "fields" }, button("Add a fact", () => addRow("", "")), h("label", {}, "Cost", cost)),
		h("div", { class: "fields" }, h("button", { class: "primary" }, "Explain and peek"), button("Check (charges)", () => ask(true), "danger")));
	const given = [...parameters];
	for (const [name, it] of given) addRow(name, it);
	let suggested = "";
	function update() {
		const names = new Set((live.limits?.limits ?? []).flatMap((limit) => [...limit.by, ...Object.keys(limit.when ?? {}), ...Object.keys(limit.unless ?? {}), limit.tier ?? "", limit.cost ?? ""]).filter(Boolean));
		if (!given.length && !rows.children.length && names.size) addRow([...names][0], "");
		if (suggested === [...names].join()) return;
		suggested = [...names].join();
		known.replaceChildren(...[...names].map((name) => h("option", { value: name })));
	}
	if (given.length) ask(false);
	return { title: "Try", element: h("div", {}, h("h1", {}, "Try a request"), form, out.element, found), update, tick: () => countDown(found) };
}

export function policyView(parameters) {
	const out = result(), about = h("p"), found = h("div");
	const lines = h("pre", { "aria-hidden": "true" });
	const text = /** @type {HTMLTextAreaElement} */ (h("textarea", { "aria-label": "Limits as JSON", spellcheck: "false", autocomplete: "off", input: number, scroll: () => (lines.scrollTop = text.scrollTop) }));
	let base = 0, asRead = "";
	function number() {
		say(lines, text.value.split("\n").map((_, index) => index + 1).join("\n"));
		lines.scrollTop = text.scrollTop;
	}
	// Short lists on one line.
	const shown = (limits) => JSON.stringify({ limits }, null, 2).replace(/\[\s+("[^[\]{}]*?)\s+\]/g, (_, list) => `[${list.replace(/\s*\n\s*/g, " ")}]`);
	const describe = () => {
		const active = live.limits;
		if (!active) return;
		const from = active.source !== "api" ? `from ${active.source}` : active.persistent ? "from api, for all nodes (persistent: true)" : "from api, until this process ends (persistent: false)";
		say(about, `Version ${active.version}, ${from}.${active.shadowed ? " It is shadowed: the file has other limits." : ""}${active.error ? ` The file was not loaded: ${active.error}` : ""}`);
	};
	async function read() {
		await readLimits();
		if (!live.limits) return;
		base = live.limits.version;
		const limits = structuredClone(live.limits.limits);
		asRead = shown(limits);
		const enforce = parameters.get("enforce");
		for (const limit of limits) if (limit.name === enforce) limit.mode = "enforce";
		text.value = shown(limits);
		number();
		describe();
		if (enforce) out.say(`In this text, ${enforce} is enforced. Nothing is changed yet.`, true);
	}
	async function check() {
		const { status, data, message } = await call("PUT", "v1/limits?dry_run=true", text.value);
		found.replaceChildren();
		if (status !== 200) { out.say("The text has errors.", false); return found.replaceChildren(block(message, "bad")); }
		out.say(data.changes.length ? "Valid. It would change this:" : "Valid. It changes nothing.", true);
		found.replaceChildren(
			...data.warnings.map((it) => h("p", {}, h("span", { class: "tag" }, `${it.code ?? "warning"} ${it.line}:${it.column}`), ` ${it.message}${it.help ? ` (${it.help})` : ""}`)),
			data.changes.length ? table("Changes", [["Limit"], ["Change"], ["Counts"]], data.changes.map((it) => row([[value(it.name)], [it.kind],
				[it.kind === "removed" ? "no longer used" : it.keeps_counts ? "kept" : "start at zero"]]))) : "", difference(asRead, text.value));
	}
	async function put() {
		if (!await confirmed(`Replace the active limits, version ${base}, with this text?`, "Put in force")) return;
		const { status, data, message } = await call("PUT", "v1/limits", text.value, { "if-match": `"${base}"` });
		if (status === 412) return conflict();
		if (status !== 200) { out.say("Nothing was changed.", false); return found.replaceChildren(block(message, "bad")); }
		live.limits = data;
		base = data.version;
		asRead = shown(data.limits);
		describe();
		found.replaceChildren();
		out.say(`Version ${base} is in force${data.persistent ? " on all nodes" : " in this process (persistent: false)"}.`, true);
	}
	async function conflict() {
		const before = base;
		await readLimits();
		describe();
		const now = live.limits;
		if (!now) return;
		out.say(`Another change came first: version ${now.version} is active, your text is of version ${before}. It is kept.`, false);
		found.replaceChildren(h("p", {}, button(`Replace version ${now.version} with my text`, () => {
			base = now.version;
			asRead = shown(now.limits);
			found.replaceChildren();
			out.say(`Your text now replaces version ${base}.`, true);
		})), h("h2", {}, `Version ${now.version}, which is active`), block(shown(now.limits)));
	}
	async function remove() {
		if (!await confirmed("Return to the limits in the file?", "Back to the file")) return;
		const { status, message } = await call("DELETE", "v1/limits");
		if (status !== 200) return out.say(message, false);
		found.replaceChildren();
		await read();
		out.say("The limits of the file are active.", true);
	}
	read();
	return { title: "Policy", element: h("div", {}, h("h1", {}, "Policy"), about, h("div", { class: "editor" }, lines, text),
		h("p", {}, button("Check text", check, "primary"), " ", button("Put in force", put, "danger"), " ",
			button("Back to the file", remove), " ", button("Discard my text", read)), out.element, found), update: describe };
}

/** The lines that differ, with the first and last equal ones left out. @param {string} before @param {string} after */
function difference(before, after) {
	const [a, b] = [before.split("\n"), after.split("\n")];
	let start = 0, end = 0;
	while (start < a.length && start < b.length && a[start] === b[start]) start++;
	while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
	const removed = a.slice(start, a.length - end).map((line) => `- ${line}`);
	const added = b.slice(start, b.length - end).map((line) => `+ ${line}`);
	if (!removed.length && !added.length) return "";
	return block([`from line ${start + 1}`, ...removed, ...added].join("\n"));
}

export function overridesView(parameters) {
	const out = result(), about = h("p", { class: "hint" }), list = h("div");
	/** @type {any[]} */ let all = [];
	const filter = input({ name: "filter", type: "search", "aria-label": "Filter", placeholder: "Filter", input: draw });
	const limit = /** @type {HTMLSelectElement} */ (h("select", { name: "limit", required: true, change: kinds }));
	const key = input({ name: "value", required: true, value: parameters.get("value") ?? "" });
	const kind = /** @type {HTMLSelectElement} */ (h("select", { name: "kind", change: kinds }, h("option", { value: "quota" }, "its own quota"), h("option", { value: "blocked" }, "blocked: refuse all"), h("option", { value: "unlimited" }, "unlimited: admit all")));
	const quotaField = input({ name: "rate", placeholder: "500/min" }), burst = input({ name: "burst", type: "number", min: 1 }), slots = input({ name: "slots", type: "number", min: 1 });
	const until = input({ name: "until", type: "datetime-local" }), note = input({ name: "note", maxlength: 200 });
	const fields = [["Rate", quotaField], ["Burst (optional)", burst], ["Slots", slots]].map(([name, field]) => h("label", {}, /** @type {string} */ (name), /** @type {Node} */ (field)));
	function kinds() {
		const chosen = live.limits?.limits.find((it) => it.name === limit.value);
		const isSlots = chosen?.algorithm === "concurrency", own = kind.value === "quota";
		fields[0].hidden = !own || isSlots;
		fields[1].hidden = !own || !(chosen?.algorithm ?? "").endsWith("bucket");
		fields[2].hidden = !own || !isSlots;
	}
	const grants = (it) => (it.blocked ? "blocked" : it.unlimited ? "unlimited" : it.slots ? `${it.slots} slots` : `${it.rate}${it.burst ? `, burst ${it.burst}` : ""}`);
	const path = (it) => `v1/overrides/${encodeURIComponent(it.limit)}/${encodeURIComponent(it.key)}`;
	function draw() {
		const words = filter.value.toLowerCase();
		const shown = all.filter((it) => `${it.limit} ${it.key} ${it.note ?? ""}`.toLowerCase().includes(words));
		if (!shown.length) return list.replaceChildren(h("p", { class: "hint" }, all.length ? "None matches." : "There are no overrides."));
		const limits = live.limits?.limits;
		const active = (it) => !limits || limits.some((limit) => limit.name === it.limit && limit.by.length === 1);
		list.replaceChildren(table(`${count(shown.length)} of ${count(all.length)} overrides${shown.length > 200 ? ", the first 200" : ""}`, [["Key"], ["Limit"], ["Quota"], ["Until", "mid"], ["Note", "mid"], ["Actions"]], shown.slice(0, 200).map((it) => row([
			[value(it.key)], [[limitLink(it.limit), active(it) ? null : " (limit not active)"]], [grants(it)], [it.until ? time(it.until, true) : "–", "mid"], [it.note ?? "", "mid"],
			[[active(it) ? button("Change", () => edit(it)) : null, " ", button("Remove", () => remove(it), "danger")]]]))));
	}
	function edit(it) {
		limit.value = it.limit;
		key.value = it.key;
		kind.value = it.blocked ? "blocked" : it.unlimited ? "unlimited" : "quota";
		quotaField.value = it.rate ?? "";
		burst.value = it.burst ?? "";
		slots.value = it.slots ?? "";
		until.value = it.until ? new Date(it.until * 1000 - new Date().getTimezoneOffset() * 60000).toISOString().slice(0, 16) : "";
		note.value = it.note ?? "";
		kinds();
		key.focus();
	}
	async function read() {
		const { status, data, message } = await call("GET", "v1/overrides");
		if (status !== 200) return out.say(message, false);
		all = data.overrides;
		say(about, data.persistent ? "They are kept across restarts (persistent: true)." : "They last until this process ends (persistent: false).");
		draw();
	}
	async function remove(it) {
		if (!await confirmed(`Remove the override of ${it.key} under ${it.limit}?`, "Remove")) return;
		const { status, data, message } = await call("DELETE", path(it));
		out.say(status !== 200 ? message : data.done ? "Removed." : "There was no such override.", status === 200);
		read();
	}
	const form = h("form", { class: "fields", submit: async (event) => {
		event.preventDefault();
		const own = kind.value === "quota";
		const body = { ...(kind.value === "blocked" ? { blocked: true } : kind.value === "unlimited" ? { unlimited: true } : {}),
			...(own && !fields[0].hidden ? { rate: quotaField.value } : {}), ...(own && !fields[1].hidden && burst.value ? { burst: Number(burst.value) } : {}),
			...(own && !fields[2].hidden ? { limit: Number(slots.value) } : {}),
			...(until.value ? { until: Math.floor(new Date(until.value).getTime() / 1000) } : {}), ...(note.value ? { note: note.value } : {}) };
		const { status, message } = await call("PUT", path({ limit: limit.value, key: key.value }), body);
		if (status !== 200) return out.say(message, false);
		out.say(`The override of ${key.value} under ${limit.value} is in force.`, true);
		read();
	} }, h("label", {}, "Limit", limit), h("label", {}, "Value of its key", key), h("label", {}, "Gets", kind), fields, h("label", {}, "Until (optional)", until), h("label", {}, "Note", note), h("button", { class: "primary" }, "Set"));
	let options = "";
	function update() {
		const names = (live.limits?.limits ?? []).filter((it) => it.by.length === 1).map((it) => it.name);
		if (options === names.join()) return;
		options = names.join();
		draw();
		limit.replaceChildren(...names.map((name) => h("option", { value: name, selected: name === parameters.get("limit") }, name)));
		kinds();
	}
	kinds();
	read();
	return { title: "Overrides", element: h("div", {}, h("h1", {}, "Overrides"), about, form, out.element, h("p", {}, filter), list), update };
}
