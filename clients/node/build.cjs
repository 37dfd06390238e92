// Builds the addon: `node build.cjs [--if-missing] [--out FILE]`. Needs Rust.

const { spawnSync } = require("node:child_process");
const { copyFileSync, existsSync } = require("node:fs");
const { join } = require("node:path");

const LIBRARIES = { darwin: "libtollkeeper_node.dylib", win32: "tollkeeper_node.dll" };
const LIBRARY = LIBRARIES[process.platform] ?? "libtollkeeper_node.so";

const option = (name, otherwise) => {
  const at = process.argv.indexOf(name);
  return at === -1 ? otherwise : process.argv[at + 1];
};
const out = option("--out", join(__dirname, "tollkeeper.node"));
const manifest = join(__dirname, "..", "Cargo.toml");

if (process.argv.includes("--if-missing") && existsSync(out)) process.exit(0);
// Both packages share a folder, so that what they have in common is built once.
const target = process.env.CARGO_TARGET_DIR ?? join(__dirname, "..", "..", "target", "clients", "cargo");
const chosen = ["--manifest-path", manifest, "-p", "tollkeeper-node", "--target-dir", target];
const args = ["build", "--quiet", "--locked", "--release", ...chosen];
const cargo = spawnSync("cargo", args, { stdio: "inherit" });
if (cargo.error) {
  console.error(`tollkeeper: cargo does not start (${cargo.error.message}): install Rust, https://rustup.rs`);
}
if (cargo.status !== 0) process.exit(1);
copyFileSync(join(target, "release", LIBRARY), out);
