// The RESP listener of a server: TK.CHECK and TK.PEEK over one connection, pipelined, in RESP 3.

import { CallTimeout, TollkeeperError } from "./error.js";
import { costOf } from "./request.js";
import { retryAfterOnly } from "./decision.js";

export class RespTransport {
  hasSlots = false;
  #host;
  #port;
  #tls;
  #hello;
  #Unsupported;
  #connection = null;

  constructor(url, token, Unsupported) {
    this.url = `${url.protocol}//${url.host}`;
    this.#host = url.hostname.replace(/^\[|\]$/g, "");
    this.#port = Number(url.port || 6380);
    this.#tls = url.protocol === "rediss:";
    const secret = token ?? decodeURIComponent(url.password);
    this.#hello = secret === "" ? ["HELLO", "3"] : ["HELLO", "3", "AUTH", "default", secret];
    this.#Unsupported = Unsupported;
  }

  async send(verb, request, signal) {
    if (verb !== "check" && verb !== "peek") {
      throw new this.#Unsupported(`${verb} is not a command of the RESP listener: use server: "http://…"`);
    }
    const command = [verb === "check" ? "TK.CHECK" : "TK.PEEK"];
    // Always with COST: a fact of that name at the first place would be read as the option.
    command.push("COST", costOf(request.cost ?? 1));
    for (let at = 0; at < request.pairs.length; at += 2) {
      const value = request.pairs[at + 1];
      if (typeof value === "object") {
        const message = `fact \`${request.pairs[at]}\`: a hash cannot be sent over RESP: use server: "http://…"`;
        throw new TollkeeperError("invalid_fact", message, `facts.${request.pairs[at]}`);
      }
      command.push(request.pairs[at], String(value));
    }
    const connection = (this.#connection ??= this.#connect());
    const reply = await connection.call(command, signal).catch((error) => {
      // It may be dead without a sign; the next call opens another one.
      if (error instanceof CallTimeout) connection.end();
      throw error;
    });
    if (!(reply instanceof ReplyError)) return { status: 200, text: reply, headers: retryAfterOnly };
    const [kind, code, ...message] = reply.message.split(" ");
    if (kind === "NOAUTH" || kind === "WRONGPASS") {
      throw new TollkeeperError("unauthorized", `${reply.message} (set \`token\`)`);
    }
    return { status: 400, text: { error: { code, message: message.join(" "), where: null } }, headers: () => ({}) };
  }

  #connect() {
    const connection = new Connection(this.#host, this.#port, this.#tls, () => {
      if (this.#connection === connection) this.#connection = null;
    });
    // Its error, if any, is also the reply of every later command.
    connection.call(this.#hello).then(
      (reply) => reply instanceof ReplyError && !/^(NOAUTH|WRONGPASS)/.test(reply.message) && connection.end(),
      () => {},
    );
    return connection;
  }

  close() {
    this.#connection?.end();
  }
}

class ReplyError extends Error {}

/** One socket. Replies are matched with commands by their order, so a command that timed out keeps its place. */
class Connection {
  #socket;
  #waiting = [];
  #received = null;

  constructor(host, port, tls, ended) {
    const { connect } = process.getBuiltinModule(tls ? "node:tls" : "node:net");
    this.#socket = connect({ host, port });
    this.#socket.setNoDelay(true);
    this.#socket.on("data", (bytes) => this.#read(bytes));
    const fail = (error) => {
      ended();
      for (const { reject } of this.#waiting.splice(0)) reject(error);
      this.#socket.destroy();
    };
    this.#socket.on("error", fail);
    this.#socket.on("close", () => fail(new Error("the connection was closed")));
  }

  call(words, signal) {
    return new Promise((resolve, reject) => {
      if (signal?.aborted) return reject(signal.reason);
      // An idle connection does not keep the process alive; a call that waits does.
      this.#socket.ref();
      this.#waiting.push({ resolve, reject });
      signal?.addEventListener("abort", () => reject(signal.reason), { once: true });
      this.#socket.write(encoded(words));
    });
  }

  end() {
    this.#socket.destroy();
  }

  #read(bytes) {
    const received = this.#received === null ? bytes : Buffer.concat([this.#received, bytes]);
    const cursor = { bytes: received, at: 0 };
    let start = 0;
    try {
      while (start < received.length) {
        const reply = value(cursor);
        start = cursor.at;
        this.#waiting.shift()?.resolve(reply);
      }
    } catch (error) {
      if (error !== INCOMPLETE) return this.#socket.destroy(error);
    }
    this.#received = start === received.length ? null : received.subarray(start);
    if (this.#waiting.length === 0) this.#socket.unref();
  }
}

function encoded(words) {
  let text = `*${words.length}\r\n`;
  for (const word of words) text += `$${Buffer.byteLength(word)}\r\n${word}\r\n`;
  return text;
}

const INCOMPLETE = Symbol("the rest of the reply has not arrived");

/** Reads one value; throws `INCOMPLETE` if it has not arrived completely. */
function value(cursor) {
  const end = cursor.bytes.indexOf("\r\n", cursor.at);
  if (end === -1) throw INCOMPLETE;
  const kind = String.fromCharCode(cursor.bytes[cursor.at]);
  const line = cursor.bytes.toString("utf8", cursor.at + 1, end);
  cursor.at = end + 2;
  switch (kind) {
    case "+":
      return line;
    case "-":
      return new ReplyError(line);
    case ":":
    case ",":
      return Number(line);
    case "#":
      return line === "t";
    case "_":
      return null;
    case "$": {
      const end = cursor.at + Number(line);
      if (cursor.bytes.length < end + 2) throw INCOMPLETE;
      const text = cursor.bytes.toString("utf8", cursor.at, end);
      cursor.at = end + 2;
      return text;
    }
    case "*":
      return Array.from({ length: Number(line) }, () => value(cursor));
    case "%": {
      const map = {};
      for (let entry = 0; entry < Number(line); entry++) {
        const name = value(cursor);
        map[name] = value(cursor);
      }
      return map;
    }
    default:
      throw new Error(`the reply is not RESP 3: ${JSON.stringify(kind + line.slice(0, 60))}`);
  }
}
