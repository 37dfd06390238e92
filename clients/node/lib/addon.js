// Loads the addon when the first engine is opened, and turns its answers into promises.

const FILE = "tollkeeper.node";

let loaded;

export function loadAddon() {
  loaded ??= withPromises(load());
  return loaded;
}

function load() {
  // Not imported above: server mode must run where there is neither Node nor an addon.
  const getBuiltinModule = globalThis.process?.getBuiltinModule;
  if (getBuiltinModule === undefined) throw notBuilt("this runtime has no Node modules");
  const require = getBuiltinModule("node:module").createRequire(import.meta.url);
  const folder = getBuiltinModule("node:path").dirname(getBuiltinModule("node:url").fileURLToPath(import.meta.url));
  try {
    return require(`../${FILE}`);
  } catch (error) {
    throw notBuilt(error.code === "MODULE_NOT_FOUND" ? null : error.message, folder.replace(/[/\\]lib$/, ""));
  }
}

function notBuilt(why, folder = "clients/node") {
  const build = `run \`npm run build\` in ${folder} (needs Rust, https://rustup.rs)`;
  const message = `the engine is not built: ${build}, or use \`server:\``;
  return new Error(why === null ? message : `${message} (${why})`);
}

/**
 * A call that has to wait for Redis returns `null`. This thread runs it: `native.run()` starts the calls that were
 * made, continues those whose reply has arrived, and returns the answers, as `NUMBER\nTEXT`. Events arrive with them,
 * as `eLISTENER\nKIND\nMESSAGE`.
 */
function withPromises(native) {
  /** The name of a call to the number under which the addon knows it. */
  const numbers = Object.fromEntries(native.calls().map((name, number) => [name, number]));
  const waiting = new Map();
  const listeners = new Map();
  const listenerOf = new Map();
  let lastCall = 0;
  let lastListener = 0;
  // Keeps the process alive while a call waits.
  const alive = setInterval(() => {}, 2 ** 30).unref();

  let isScheduled = false;

  const run = () => {
    isScheduled = false;
    for (const message of native.run()) {
      const end = message.indexOf("\n");
      if (message[0] === "e") {
        const kind = message.indexOf("\n", end + 1);
        const listener = listeners.get(Number(message.slice(1, end)));
        // In a task of its own: if a listener throws, the other messages must not be lost.
        if (listener) setImmediate(listener, message.slice(end + 1, kind), message.slice(kind + 1));
        continue;
      }
      const call = Number(message.slice(0, end));
      const resolve = waiting.get(call);
      waiting.delete(call);
      resolve?.(message.slice(end + 1));
    }
    if (waiting.size === 0) alive.unref();
  };
  native.connect(run);

  const later = (call) => {
    if (waiting.size === 0) alive.ref();
    // Calls that are made together start together.
    if (!isScheduled) queueMicrotask(run);
    isScheduled = true;
    return new Promise((resolve) => waiting.set(call, resolve));
  };
  return {
    open(file, source, store, name, at, listener) {
      lastListener += 1;
      const number = native.open(file, source, store, name, at, lastListener);
      listeners.set(lastListener, listener);
      listenerOf.set(number, lastListener);
      return number;
    },
    ask(number, name, text, headers) {
      lastCall += 1;
      return native.ask(number, lastCall, numbers[name], text, headers) ?? later(lastCall);
    },
    visit(number, head, own, bodyKind, body, decision) {
      lastCall += 1;
      return native.visit(number, lastCall, head, own, bodyKind, body, decision) ?? later(lastCall);
    },
    close(number) {
      native.close(number);
      listeners.delete(listenerOf.get(number));
      listenerOf.delete(number);
    },
    isRemote: native.isRemote,
    policy: native.policy,
    answered: native.answered,
    gone: native.gone,
    advance: native.advance,
  };
}
