//! Runs the tests of the Node package, `clients/node/test`, against the package as `tools/clients` packs it, with real
//! frameworks from npm. Everything is built and installed into `target/clients`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use tollkeeper_tests::languages::{run, run_tests};
use tollkeeper_tests::packages;
use tollkeeper_tests::page::{Kind, Page, root};

tollkeeper_tests::test_files!(
    "clients/node/test",
    "",
    ".test.mjs",
    [
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
    ]
);

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

/// `npm install FOLDER` of an unpacked package builds the addon itself.
#[test]
fn npm_installs_the_folder() {
    let installed = installed();
    let folder = root().join("target/clients/npm-folder");
    if folder.exists() {
        fs::remove_dir_all(&folder).expect("`target` is writable");
    }
    fs::create_dir_all(&folder).expect("`target` is writable");
    fs::write(folder.join("package.json"), r#"{"private":true,"type":"module"}"#)
        .expect("`target` is writable");
    let mut npm = Command::new("npm");
    npm.args([
        "install",
        "--no-audit",
        "--no-fund",
        "--no-package-lock",
        "--foreground-scripts",
        "--loglevel=error",
    ]);
    npm.arg(root().join("clients/node")).current_dir(&folder);
    // So that dependencies are compiled once.
    run(npm.env("CARGO_TARGET_DIR", installed.with_file_name("cargo")));
    let script = "import { Limiter } from 'tollkeeper'; \
                  console.log(new Limiter({ limits: [{ name: 'all', rate: '1/s' }] }).checkSync({}).remaining)";
    let printed = run(Command::new("node").args(["--input-type=module", "-e", script]).current_dir(&folder));
    // npm links the folder, so the addon is in it.
    fs::remove_file(root().join("clients/node/tollkeeper.node")).expect("the build wrote it");
    assert_eq!(printed, "0\n");
}

#[test]
fn package_has_what_its_scripts_need() {
    let text = fs::read_to_string(root().join("clients/node/package.json")).expect("the package");
    let package: serde_json::Value = serde_json::from_str(&text).expect("valid JSON");
    let files = package["files"].as_array().expect("a list");
    for script in package["scripts"].as_object().expect("an object").values() {
        let file = script.as_str().and_then(|script| script.split(' ').nth(1)).expect("node FILE");
        assert!(files.iter().any(|name| name == file), "`{file}` is not packed");
    }
}

#[test]
fn built_packages_are_where_the_tool_says() {
    assert!(installed().exists());
    for part in ["node", "python"] {
        let package = packages::built(part);
        let name = package.file_name().and_then(|name| name.to_str()).expect("a name");
        let workspace = version("Cargo.toml", "version = \"");
        assert!(name.starts_with(&format!("tollkeeper-{workspace}")), "{name}");
        assert!(
            package.starts_with(root().join("target/clients")) && package.exists(),
            "{}",
            package.display()
        );
    }
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
