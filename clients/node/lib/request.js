// Checks what a caller passes, before anything is charged, and writes it as JSON.

import { TollkeeperError } from "./error.js";

const MAX_VALUE = 1024;

/**
 * The facts as `[name, value, name, value, …]`. `undefined` counts as absent.
 * @param {unknown} facts
 */
export function pairsOf(facts) {
  if (!isPlainObject(facts)) {
    throw invalidFact("facts", '`facts` must be a plain object of names and values, such as { user: "alice" }');
  }
  const pairs = [];
  for (const name of Object.keys(facts)) {
    const value = facts[name];
    if (value !== undefined) pairs.push(name, valueOf(name, value));
  }
  return pairs;
}

/** A string, a safe whole number, a boolean or `{ sha256 }`. */
function valueOf(name, value) {
  const invalid = (what) => invalidFact(`facts.${name.slice(0, 64)}`, `fact \`${name.slice(0, 64)}\`: ${what}`);
  if (!name.isWellFormed()) throw invalid("its name has a lone surrogate and is not Unicode");
  switch (typeof value) {
    case "string":
      if (value.length > MAX_VALUE) throw invalid("its value is longer than 1 KiB");
      if (!value.isWellFormed()) throw invalid("its value has a lone surrogate and is not Unicode");
      return value;
    case "number":
      if (Number.isSafeInteger(value)) return value;
      throw invalid(`${value} is not a whole number below 2^53 (pass it as a string)`);
    case "bigint":
      return valueOf(name, String(value));
    case "boolean":
      return value;
    case "object":
      if (value === null) throw invalid("null is not a value (leave the fact out)");
      if (isPlainObject(value) && typeof value.sha256 === "string" && Object.keys(value).length === 1) return value;
      throw invalid('an object must be a hash of 32 hexadecimal digits, { sha256: "…" }');
    default:
      throw invalid(`a ${typeof value} is not a value: pass a string, a whole number or a boolean`);
  }
}

/** Map, Date and other class instances have no facts as their own properties, and would pass as empty. */
function isPlainObject(value) {
  if (typeof value !== "object" || value === null || Array.isArray(value)) return false;
  const prototype = Object.getPrototypeOf(value);
  return prototype === null || Object.getPrototypeOf(prototype) === null;
}

function invalidFact(where, message) {
  return new TollkeeperError("invalid_fact", message, where);
}

/** `{"facts":{…},"cost":2,"ttl":"60s"}` */
export function bodyOf(pairs, cost, ttl) {
  let text = '{"facts":{';
  for (let at = 0; at < pairs.length; at += 2) {
    if (at > 0) text += ",";
    text += JSON.stringify(pairs[at]) + ":" + JSON.stringify(pairs[at + 1]);
  }
  text += "}";
  if (cost !== undefined) text += `,"cost":${costOf(cost)}`;
  if (ttl !== undefined) text += `,"ttl":${JSON.stringify(ttl)}`;
  return text + "}";
}

/** The engine judges the range; here the cost only has to be a number of JSON. */
export function costOf(cost) {
  if (typeof cost === "bigint" || Number.isSafeInteger(cost)) return String(cost);
  throw new TollkeeperError(
    "invalid_cost",
    `the cost ${typeof cost === "symbol" ? "symbol" : cost} is not a whole number from 1 to 2147483648`,
    "cost",
  );
}

/** Refuses options that a call does not have, so that a misspelt one is not ignored. */
export function onlyOptions(options, known) {
  if (options === undefined) return {};
  if (!isPlainObject(options)) {
    throw new TollkeeperError("unknown_field", `options must be an object with ${listed(known)}`);
  }
  for (const name of Object.keys(options)) {
    if (!known.includes(name)) {
      throw new TollkeeperError("unknown_field", `unknown option \`${name}\`: this call takes ${listed(known)}`, name);
    }
  }
  return options;
}

function listed(names) {
  return names.length === 0 ? "no options" : names.map((name) => `\`${name}\``).join(", ");
}
