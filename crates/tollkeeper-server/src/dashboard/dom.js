// Builds elements from text, never from HTML, and formats values.

/**
 * An element with attributes and children. A function is a listener, `true` an empty attribute; `null`, `undefined` and
 * `false` leave the attribute out.
 * @param {string} tag @param {Attributes} [attributes] @param {...(Child | Child[])} children
 * @returns {HTMLElement}
 */
export function h(tag, attributes = {}, ...children) {
	return /** @type {HTMLElement} */ (fill(document.createElement(tag), attributes, children));
}

/** As `h`, for SVG. @param {string} tag @param {Attributes} [attributes] @param {...(Child | Child[])} children */
export function svg(tag, attributes = {}, ...children) {
	return /** @type {SVGElement} */ (fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children));
}

function fill(element, attributes, children) {
	for (const [name, value] of Object.entries(attributes)) {
		if (typeof value === "function") element.addEventListener(name, /** @type {EventListener} */ (value));
		else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : String(value));
	}
	for (const child of children.flat()) {
		if (child !== null && child !== undefined && child !== false) element.append(child instanceof Node ? child : String(child));
	}
	return element;
}

/** The element with this id. @template {HTMLElement} [T=HTMLElement] @param {string} id @returns {T} */
export function by(id) {
	return /** @type {T} */ (document.getElementById(id));
}

/** Sets the text of an element, if it differs. @param {Element} element @param {string} text */
export function say(element, text) {
	if (element.textContent !== text) element.textContent = text;
}

/** Values from clients: cut in the middle, isolated against right-to-left marks, the whole in a tooltip.
 * @param {string} text @param {number} [most] */
export function value(text, most = 48) {
	const chars = [...text];
	const cut = chars.length > most ? `${chars.slice(0, most - 13).join("")}…${chars.slice(-12).join("")}` : text;
	return h("bdi", { class: "mono", title: cut === text ? null : text }, cut);
}

/** A key as shown: its values, or all requests. @param {(string | null)[]} key */
export function keyText(key) {
	return key.length ? key.map((part) => part ?? "(absent)").join(" ") : "(all)";
}

/** The sum of what is known. @param {(number | null)[]} counts @returns {number} */
export function total(counts) {
	let sum = 0;
	for (const n of counts) sum += n ?? 0;
	return sum;
}

export function count(n) {
	return n.toLocaleString("en");
}

/** A count per second. @param {number} n */
export function rate(n) {
	if (n === 0) return "0";
	if (n < 10) return n.toFixed(1);
	return n < 10000 ? n.toFixed(0) : `${(n / 1000).toFixed(1)}k`;
}

export function percent(part, whole) {
	return whole ? `${((100 * part) / whole).toFixed(1)} %` : "–";
}

/** Seconds in readable units. @param {number} s */
export function duration(s) {
	if (s < 10) return `${Math.ceil(s * 10) / 10} s`;
	if (s < 120) return `${Math.ceil(s)} s`;
	if (s < 7200) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
	if (s < 172800) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
	return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

/** A time in the browser's zone, with the ISO form as a tooltip. @param {number} unix @param {boolean} [date] */
export function time(unix, date = false) {
	const at = new Date(unix * 1000);
	return h("time", { datetime: at.toISOString(), title: at.toISOString() }, date ? at.toLocaleString() : at.toLocaleTimeString());
}

export function clock(unix) {
	return new Date(unix * 1000).toLocaleTimeString();
}

/** A table with a caption. A column is `[heading, class]`. @param {string} caption @param {[string, string?][]} columns @param {Node[]} rows */
export function table(caption, columns, rows) {
	return h("table", {}, h("caption", {}, caption),
		h("thead", {}, h("tr", {}, columns.map(([name, kind]) => h("th", { scope: "col", class: kind }, name)))),
		h("tbody", {}, rows));
}

/** A row whose first cell is its heading. @param {[Child | Child[], string?][]} cells */
export function row(cells) {
	return h("tr", {}, cells.map(([child, kind], index) => h(index ? "td" : "th", { scope: index ? null : "row", class: kind }, child)));
}

/** How much is left, as a bar. @param {number | null} left @param {number} of */
export function meter(left, of) {
	const share = left === null || !of ? 0 : Math.min(1, left / of);
	return svg("svg", { class: "meter", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
		svg("rect", { width: 100, height: 10 }), svg("rect", { class: share ? "left" : "none", width: share ? 100 * share : 2, height: 10 }));
}

/** Asks for confirmation in a dialog. @param {string} text @param {string} yes @returns {Promise<boolean>} */
export function confirmed(text, yes) {
	const dialog = /** @type {HTMLDialogElement} */ (by("confirm"));
	say(by("confirm-text"), text);
	say(by("confirm-yes"), yes);
	dialog.returnValue = "no";
	dialog.showModal();
	return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

let announced = 0;
/** Announces to screen readers, at most once in ten seconds unless the user caused it. @param {string} text @param {boolean} [now] */
export function announce(text, now = false) {
	if (!now && Date.now() - announced < 10000) return;
	announced = Date.now();
	say(by("live"), text);
}
