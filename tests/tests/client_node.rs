//! Runs the tests of the Node package, `clients/node/test`, against the package as `tools/clients` packs it, with real
//! frameworks from npm. Everything is built and installed into `target/clients`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use tollkeeper_tests::languages::{run, run_tests};
use tollkeeper_tests::packages;
use tollkeeper_tests::page::{Kind, Page, root};

/// One test per file of `clients/node/test`.
macro_rules! files {
    ($($name:ident),+ $(,)?) => {
        $(#[test]
        fn $name() {
            passes(concat!(stringify!($name), ".test.mjs"));
        })+

        #[test]
        fn every_file_is_run() {
            let mut files: Vec<String> = fs::read_dir(root().join("clients/node/test"))
                .expect("a folder")
                .filter_map(|entry| Some(entry.ok()?.file_name().to_str()?.strip_suffix(".test.mjs")?.to_owned()))
                .collect();
            files.sort();
            assert_eq!(files, [$(stringify!($name)),+]);
        }
    };
}

files![
    conformance,
    frameworks,
    identity,
    input,
    lifecycle,
    memory,
    middleware,
    middleware_redis,
    middleware_server,
    next,
    page,
    redis,
    server_mode,
    store,
    websocket,
];

#[test]
fn types_accept_the_examples() {
    let installed = installed();
    run(Command::new("npx").args(["tsc", "-p", "test/tsconfig.json"]).current_dir(installed));
}

/// Without the addon, the engine says what to do, and server mode is unaffected.
#[test]
fn missing_addon_is_explained() {
    let folder = root().join("target/clients/without-addon");
    let package = folder.join("node_modules/tollkeeper");
    fs::create_dir_all(&package).expect("`target` is writable");
    let copy =
        format!("cp -r clients/node/*.js clients/node/lib clients/node/package.json '{}'", package.display());
    run(Command::new("sh").args(["-c", &copy]).current_dir(root()));
    let script = "import { Limiter } from 'tollkeeper'; \
                  new Limiter({ server: 'http://127.0.0.1:8080' }); \
                  try { new Limiter({ limits: [] }); } catch (error) { console.log(error.message); }";
    let printed = run(Command::new("node").args(["--input-type=module", "-e", script]).current_dir(&folder));
    assert!(printed.starts_with("the engine is not built: run `npm run build` in "), "{printed}");
    assert!(printed.ends_with("or use `server:`\n"), "{printed}");
}

#[test]
fn packages_have_the_version_of_the_workspace() {
    let workspace = version("Cargo.toml", "version = \"");
    for (file, prefix) in [
        ("clients/Cargo.toml", "version = \""),
        ("clients/node/package.json", "\"version\": \""),
        ("clients/python/pyproject.toml", "version = \""),
    ] {
        assert_eq!(version(file, prefix), workspace, "{file}");
    }
}

/// The first version in a file.
fn version(file: &str, prefix: &str) -> String {
    let text = fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
    let line = text.lines().find_map(|line| line.trim().strip_prefix(prefix));
    line.and_then(|rest| rest.split('"').next()).unwrap_or_else(|| panic!("no version in {file}")).to_owned()
}

fn passes(file: &str) {
    let installed = installed();
    let mut node = Command::new("node");
    node.args(["--test", "--test-reporter", "spec"]).arg(format!("test/{file}")).current_dir(installed);
    node.env("CONFORMANCE", root().join("clients/conformance"));
    run_tests(&mut node);
}

/// The folder in which the package and the frameworks are installed, with a copy of the tests and of the programs of the page.
fn installed() -> &'static Path {
    static INSTALLED: OnceLock<PathBuf> = OnceLock::new();
    INSTALLED.get_or_init(|| {
        let folder = packages::node();
        let tests = format!("rm -rf '{0}/test' && cp -r clients/node/test '{0}/test'", folder.display());
        run(Command::new("sh").args(["-c", &tests]).current_dir(root()));
        write_programs(&folder.join("page"));
        folder
    })
}

/// Writes the programs of docs/node.md, which `page.test.mjs` runs.
fn write_programs(folder: &Path) {
    fs::create_dir_all(folder).expect("`target` is writable");
    let text = fs::read_to_string(root().join("docs/node.md")).expect("the page");
    let page = Page::parse("docs/node.md", &text).unwrap_or_else(|mistake| panic!("{mistake}"));
    for block in &page.blocks {
        if let (Kind::Program, Some(file)) = (block.kind, &block.file) {
            fs::write(folder.join(file), &block.text).expect("`target` is writable");
        }
    }
}
