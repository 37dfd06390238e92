// Charts in SVG: areas, lines, bars and sparklines, each with a table of its numbers. Never more than 600 points.
import { clock, count, h, rate, row, say, svg, table, total } from "./dom.js";

const [HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [220, 44, 8, 8, 24];
const MOST = 600;

/** A shape beside the colour, so that series differ without colours. @param {string} kind */
function shape(kind) {
	if (kind === "allowed") return svg("rect", { class: kind, x: 3, y: 3, width: 10, height: 10 });
	if (kind === "refused") return svg("path", { class: kind, d: "M8 2 14 14 2 14z" });
	if (kind === "degraded") return svg("circle", { class: kind, cx: 8, cy: 8, r: 5 });
	return svg("path", { class: kind, d: "M8 2 14 8 8 14 2 8z" });
}

/** Joins neighbours until there are at most 600. @param {ChartData} data @returns {ChartData} */
function thinned(data) {
	const length = data.series[0]?.counts.length ?? 0;
	const joined = Math.ceil(length / MOST);
	if (joined <= 1) return data;
	const join = (counts) => {
		const out = [];
		for (let end = length; end > 0; end -= joined) {
			const part = counts.slice(Math.max(0, end - joined), end);
			out.unshift(part.some((n) => n !== null) ? total(part) : null);
		}
		return out;
	};
	return { ...data, step: data.step * joined, series: data.series.map((it) => ({ ...it, counts: join(it.counts) })) };
}

/** A chart of counts per second. `stacked` areas, or lines. @param {string} title @param {boolean} stacked */
export function chart(title, stacked) {
	const plot = svg("g");
	const cross = svg("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
	const axes = svg("g");
	const picture = svg("svg", { height: HEIGHT, role: "img", mousemove: move, mouseleave: () => hover(null) }, axes, plot, cross);
	const summary = h("figcaption");
	const legend = h("div", { class: "legend", "aria-hidden": "true" });
	const body = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `${title}, as table` });
	const details = /** @type {HTMLDetailsElement} */ (h("details", { toggle: () => tabulate() }, h("summary", {}, "As table"), body));
	const element = h("figure", {}, picture, legend, summary, details);
	/** @type {ChartData} */ let data = { step: 1, until: 0, series: [] };
	/** @type {SVGElement[]} */ let paths = [];
	let kinds = "", text = "", tabled = 0, width = 760;
	/** Where a point is drawn. @param {number} index @param {number} points */
	const place = (index, points) => Math.round((LEFT + (index / Math.max(1, points - 1)) * (width - LEFT - RIGHT)) * 10) / 10;

	function move(event) {
		const box = picture.getBoundingClientRect();
		hover(event.clientX - box.left);
	}

	function hover(x) {
		const points = data.series[0]?.counts.length ?? 0;
		const index = x === null ? -1 : Math.round(((x - LEFT) / (width - LEFT - RIGHT)) * (points - 1));
		const at = index >= 0 && index < points;
		cross.setAttribute("visibility", at ? "visible" : "hidden");
		if (!at) return say(summary, text);
		const px = String(place(index, points));
		cross.setAttribute("x1", px);
		cross.setAttribute("x2", px);
		const began = data.until - (points - index) * data.step;
		say(summary, `${clock(began)}: ${data.series.map((it) => `${it.name} ${count(it.counts[index] ?? 0)}`).join(", ")}`);
	}

	function update(next) {
		data = thinned(next);
		width = picture.clientWidth || width;
		const points = data.series[0]?.counts.length ?? 0;
		if (kinds !== data.series.map((it) => it.kind).join()) {
			kinds = data.series.map((it) => it.kind).join();
			paths = data.series.map((it) => svg("path", { class: `${it.kind} ${stacked ? "area" : "line"}` }));
			plot.replaceChildren(...paths);
			legend.replaceChildren(...data.series.map((it) => h("span", {}, svg("svg", { viewBox: "0 0 16 16" }, shape(it.kind)), it.name)));
		}
		const base = new Array(points).fill(0);
		const tops = data.series.map((it) => it.counts.map((n, i) => (n === null ? null : (stacked ? (base[i] += n / data.step) : n / data.step))));
		const most = nice(Math.max(1, ...tops.flat().map((n) => n ?? 0)));
		const y = (n) => Math.round((HEIGHT - BOTTOM - (n / most) * (HEIGHT - TOP - BOTTOM)) * 10) / 10;
		tops.forEach((top, index) => {
			let line = "";
			let back = "";
			top.forEach((n, i) => {
				if (n === null) return;
				line += `${line ? "L" : "M"}${place(i, points)} ${y(n)}`;
				if (stacked) back = `L${place(i, points)} ${y(index ? (tops[index - 1][i] ?? 0) : 0)}${back}`;
			});
			paths[index].setAttribute("d", stacked && line ? `${line}${back}Z` : line);
		});
		drawAxes(points, most, y);
		const sums = data.series.map((it) => `${count(total(it.counts))} ${it.name}`);
		text = `${sums.join(", ")} in ${span(points * data.step)}`;
		picture.setAttribute("aria-label", `${title}: ${text}`);
		if (cross.getAttribute("visibility") !== "visible") say(summary, text);
		if (details.open && Date.now() - tabled > 5000) tabulate();
	}

	function drawAxes(points, most, y) {
		const marks = [];
		for (const n of [0, most / 2, most]) {
			marks.push(svg("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: y(n), y2: y(n) }));
			marks.push(svg("text", { class: "axis-text", x: LEFT - 6, y: y(n) + 4, "text-anchor": "end" }, rate(n)));
		}
		for (const part of [0, 0.5, 1]) {
			const anchor = part === 0 ? "start" : part === 1 ? "end" : "middle";
			const at = data.until - (1 - part) * points * data.step;
			marks.push(svg("text", { class: "axis-text", x: LEFT + part * (width - LEFT - RIGHT), y: HEIGHT - 6, "text-anchor": anchor }, clock(at)));
		}
		axes.replaceChildren(...marks);
	}

	/** Fills the table behind the chart, newest first; without it nothing is in the page. */
	function tabulate() {
		tabled = Date.now();
		if (!details.open) return body.replaceChildren();
		const points = data.series[0]?.counts.length ?? 0;
		const rows = [];
		for (let i = points - 1; i >= 0; i--) {
			if (data.series[0].counts[i] === null) continue;
			rows.push(row([[clock(data.until - (points - i) * data.step)], ...data.series.map((it) => /** @type {[string, string]} */ ([count(it.counts[i] ?? 0), "num"]))]));
		}
		body.replaceChildren(table(`${title}, per ${span(data.step)}`, [["From"], ...data.series.map((it) => /** @type {[string, string]} */ ([it.name, "num"]))], rows));
	}

	return { element, update };
}

/** The next round number. @param {number} n */
function nice(n) {
	const unit = 10 ** Math.floor(Math.log10(n));
	return unit * ([1, 2, 5, 10].find((it) => it * unit >= n) ?? 10);
}

function span(s) {
	if (s < 120) return s === 1 ? "second" : `${s} s`;
	return s < 7200 ? `${s / 60} min` : `${s / 3600} h`;
}

/** A small line without axes. */
export function sparkline() {
	const path = svg("path", { class: "refused line" });
	const element = svg("svg", { class: "spark", viewBox: "0 0 120 22", "aria-hidden": "true" }, path);
	return {
		element,
		update(counts) {
			const most = Math.max(1, ...counts.map((n) => n ?? 0));
			const last = Math.max(1, counts.length - 1);
			path.setAttribute("d", counts.map((n, i) => `${i ? "L" : "M"}${Math.round((i / last) * 1200) / 10} ${21 - Math.round(((n ?? 0) / most) * 19)}`).join(""));
		},
	};
}

const SHARES = ["none left", "up to 10 %", "up to 25 %", "up to 50 %", "up to 75 %", "up to 90 %", "up to 100 %"];

/** Seven bars: how many decisions left how much of the limit. */
export function histogram() {
	const plot = svg("g");
	const picture = svg("svg", { viewBox: "0 0 380 206", height: 206, role: "img" }, plot);
	const body = h("div");
	const element = h("figure", {}, picture, h("figcaption", {}, "Share of the limit that was left after each decision"), h("details", {}, h("summary", {}, "As table"), body));
	return {
		element,
		update(counts) {
			const most = Math.max(1, ...counts);
			plot.replaceChildren(...counts.flatMap((n, i) => {
				const height = Math.round((n / most) * 150);
				return [svg("rect", { class: i ? "allowed" : "refused", x: 8 + i * 53, y: 180 - height, width: 42, height: Math.max(1, height) }),
					svg("text", { class: "axis-text", x: 29 + i * 53, y: 174 - height, "text-anchor": "middle" }, n ? count(n) : ""),
					svg("text", { class: "axis-text", x: 29 + i * 53, y: 198, "text-anchor": "middle" }, i ? SHARES[i].slice(6) : "none")];
			}));
			picture.setAttribute("aria-label", `Share of the limit left: ${counts.map((n, i) => `${SHARES[i]} ${n}`).join(", ")}`);
			body.replaceChildren(table("Decisions by share left, since the start", [["Left"], ["Decisions", "num"]], counts.map((n, i) => row([[SHARES[i]], [count(n), "num"]]))));
		},
	};
}
