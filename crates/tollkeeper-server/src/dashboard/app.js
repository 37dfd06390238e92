// Starts the page: sign-in, routes, keys, and what runs while the page is visible.
import { follow, live, readTop, showBanner, signIn, signedIn, signOut, start, stop, whenSignedOut } from "./data.js";
import { announce, by, say } from "./dom.js";
import { keyView, limitView, nowView, overridesView, policyView, tryView, upstreamView } from "./views.js";

/** @type {View | null} */ let view = null;
/** @type {ReturnType<typeof setInterval> | undefined} */ let polling;

/** The view of the address: `#/limits/NAME`, `#/key/REF`, `#/try?user=alice`. @returns {View} */
function route() {
	const [path, query] = (location.hash.slice(1) || "/").split("?");
	const [, name = "", rest = ""] = path.split("/");
	const parameters = new URLSearchParams(query);
	const argument = decoded(rest);
	if (name === "limits" && argument) return limitView(argument);
	if (name === "key") return keyView(argument, parameters);
	if (name === "try") return tryView(parameters);
	if (name === "policy") return policyView(parameters);
	if (name === "overrides") return overridesView(parameters);
	if (name === "upstream") return upstreamView();
	return nowView();
}

function decoded(text) {
	try {
		return decodeURIComponent(text);
	} catch {
		return text;
	}
}

function show() {
	if (by("nav").hidden) return;
	const focused = view !== null;
	view = route();
	document.title = `${view.title} – Tollkeeper`;
	by("view").replaceChildren(view.element);
	const first = location.hash.split("?")[0].split("/")[1] ?? "";
	for (const link of by("nav").querySelectorAll("a")) {
		const current = (link.getAttribute("href") ?? "").slice(2) === (first === "limits" ? "" : first);
		if (current) link.setAttribute("aria-current", "page");
		else link.removeAttribute("aria-current");
	}
	view.update?.();
	if (focused) by("main").focus({ preventScroll: true });
	scrollTo(0, 0);
}

function enter() {
	by("sign-in").hidden = true;
	for (const id of ["nav", "help"]) by(id).hidden = false;
	by("sign-out").hidden = !signedIn();
	clearInterval(polling);
	let ticks = 0;
	polling = setInterval(() => {
		if (document.hidden) return;
		showBanner();
		view?.tick?.();
		if (ticks++ % 5 === 4) readTop().then(() => view?.update?.());
	}, 1000);
	readTop().then(() => view?.update?.());
	start();
	show();
}

whenSignedOut(() => {
	clearInterval(polling);
	view = null;
	by("view").replaceChildren();
	for (const id of ["nav", "help", "sign-out", "banner"]) by(id).hidden = true;
	by("sign-in").hidden = false;
	document.title = "Tollkeeper";
	by("token").focus();
});

by("sign-in").addEventListener("submit", async (event) => {
	event.preventDefault();
	const field = /** @type {HTMLInputElement} */ (by("token"));
	const stay = /** @type {HTMLInputElement} */ (by("stay"));
	const status = await signIn(field.value, stay.checked);
	field.value = "";
	if (status === 200) {
		say(by("sign-in-error"), "");
		return enter();
	}
	say(by("sign-in-error"), status === 401 ? "The server did not accept this token." : `The server did not answer (${status}).`);
	field.focus();
});
by("sign-out").addEventListener("click", () => {
	signOut();
	announce("signed out", true);
});
by("help").addEventListener("click", () => /** @type {HTMLDialogElement} */ (by("keys-dialog")).showModal());
by("skip").addEventListener("click", (event) => {
	event.preventDefault();
	by("main").focus();
});
addEventListener("hashchange", show);
document.addEventListener("visibilitychange", () => (document.hidden ? stop() : by("nav").hidden || start()));
follow(() => {
	by("upstream").hidden = !live.event?.upstream;
	view?.update?.();
});

let waiting = false;
addEventListener("keydown", (event) => {
	const target = /** @type {HTMLElement} */ (event.target);
	if (event.ctrlKey || event.metaKey || event.altKey || by("nav").hidden) return;
	if (target.matches("input, textarea, select") || document.querySelector("dialog[open]")) return;
	if (waiting) {
		waiting = false;
		const first = live.limits?.limits[0]?.name;
		const to = new Map([["n", "#/"], ["l", first ? `#/limits/${first}` : "#/"], ["k", "#/key"], ["t", "#/try"], ["p", "#/policy"], ["o", "#/overrides"], ["u", "#/upstream"]]).get(event.key);
		if (to) location.hash = to;
	} else if (event.key === "g") {
		waiting = true;
		setTimeout(() => (waiting = false), 1500);
	} else if (event.key === "/") {
		event.preventDefault();
		location.hash = "#/key";
		setTimeout(() => by("facts")?.focus());
	} else if (event.key === "?") {
		/** @type {HTMLDialogElement} */ (by("keys-dialog")).showModal();
	}
});

const stored = sessionStorage.getItem("tollkeeper-token") ?? "";
signIn(stored, false).then((status) => {
	if (status === 200) enter();
	else if (status === 401 && stored) signOut("The server did not accept this token.");
});
