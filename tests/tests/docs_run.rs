//! Runs the code blocks of the README and of every page in `docs`, and compares their output with what the page shows.
//!
//! A page runs as a reader would follow it: its blocks in order, in one shell, in an empty folder, with `tollkeeper` in
//! the path. `tollkeeper_tests::page` documents the info strings of blocks. Beyond that:
//!
//! - A block that ends with `tollkeeper serve` (or `proxy`) runs in the background, and the page continues when the
//!   server listens. The next such block stops the server first, as the reader would; so does the end of the page.
//! - A block after a line like ``Save this as `tollkeeper.yaml`:`` is saved to that file, at that point of the page.
//! - Every policy is validated: each `yaml` block without a file name, and every block with top-level `limits`.
//!
//! Pages use 127.0.0.1:8080, so each runs in its own network and PID namespace, which ends with it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

use tollkeeper_tests::binary;
use tollkeeper_tests::page::{Block, Kind, Language, Mistake, Page, as_shown};

/// Seconds that one page may take.
const DEADLINE: &str = "120";

/// Pages that promise policies without warnings.
const WITHOUT_WARNINGS: &[&str] = &["docs/choosing-limits.md"];

#[test]
fn every_page_runs_as_shown() {
    let mut mistakes = Vec::new();
    for (name, text) in Page::all() {
        match Page::parse(&name, &text) {
            Ok(page) => mistakes.extend(follow(&page)),
            Err(mistake) => mistakes.push(mistake),
        }
    }
    assert!(mistakes.is_empty(), "{}", listed(&mistakes));
}

/// How the README runs `tollkeeper` before it is installed.
const THROUGH_CARGO: &str = "cargo run --release --bin tollkeeper -- ";

/// Runs a page and returns what is wrong with it.
fn follow(page: &Page) -> Vec<Mistake> {
    let folder = Folder::new();
    let mut mistakes = Vec::new();
    let mut script = Script::new(&folder);
    for block in &page.blocks {
        let file = folder.run.join(format!("{}.{}", block.number, ending(block)));
        // The tests have built the binary already, so it is run directly instead of through cargo.
        let block = &Block { text: block.text.replace(THROUGH_CARGO, "tollkeeper "), ..block.clone() };
        write(&file, &block.text);
        let checked = match block.kind {
            Kind::Run(status) => {
                let terminal = page.shown(block).is_some_and(|shown| shown.kind == Kind::Console);
                script.run(block, status, terminal);
                Ok(())
            }
            Kind::Setup => {
                println!("{}: not run here:\n{}", page.place(block), block.text);
                check("bash", &["-n"], &file)
            }
            Kind::NotRun(Language::Go) => check("go", &["vet"], &file),
            Kind::NotRun(_) => check("bash", &["-n"], &file),
            Kind::Data(language) => validate(page, block, language, &file),
            Kind::Text | Kind::Console | Kind::Program => Ok(()),
        };
        if let Some(name) = &block.file {
            script.save(&file, name);
        }
        mistakes.extend(checked.err().map(|what| Mistake { place: page.place(block), what }));
    }
    if page.blocks.iter().any(|block| matches!(block.kind, Kind::Run(_))) {
        mistakes.extend(play(page, &folder, &script));
    }
    mistakes
}

/// Runs all blocks of a page and compares their output.
fn play(page: &Page, folder: &Folder, script: &Script) -> Option<Mistake> {
    write(&folder.run.join("page.sh"), &script.text);
    let path = [binary::tollkeeper().parent().expect("a folder").to_owned()];
    let path = std::env::join_paths(
        path.into_iter().chain(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())),
    );
    let mut bash = isolated(&["bash", "--noprofile", "--norc", "-eu"]);
    bash.arg(folder.run.join("page.sh")).current_dir(&folder.work).env("PATH", path.expect("no colon in it"));
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if name.starts_with("TOLLKEEPER_") || name.to_lowercase().ends_with("_proxy") {
            bash.env_remove(name);
        }
    }
    let ended = bash.output().expect("coreutils have `timeout`");

    let at: usize =
        fs::read_to_string(folder.run.join("at")).map_or(0, |at| at.trim().parse().expect("a number"));
    for block in page.blocks.iter().filter(|block| matches!(block.kind, Kind::Run(_)) && block.number <= at) {
        let wrote = |stream| fs::read_to_string(folder.run.join(format!("{}.{stream}", block.number)));
        let (out, err) = (wrote("out").unwrap_or_default(), wrote("err").unwrap_or_default());
        let mistake = |what: String| {
            let what = format!(
                "{what}\n--- the block\n{}--- standard output\n{out}--- standard error\n{err}",
                block.text
            );
            Some(Mistake { place: page.place(block), what })
        };
        if block.number == at && !ended.status.success() {
            return mistake(match ended.status.code() {
                Some(124 | 137) => format!("the page timed out after {DEADLINE} s in this block"),
                _ => format!("failed ({}) {}", ended.status, String::from_utf8_lossy(&ended.stderr)),
            });
        }
        if let Some(shown) = page.shown(block)
            && !as_shown(&shown.text, &out)
        {
            return mistake(format!(
                "the output differs from what line {} shows:\n{}",
                shown.line, shown.text
            ));
        }
    }
    assert!(ended.status.success(), "{}: {}", page.name, String::from_utf8_lossy(&ended.stderr));
    None
}

/// A command in its own network and PID namespace.
fn isolated(command: &[&str]) -> Command {
    let mut isolated = Command::new("timeout");
    isolated
        .args([
            "--kill-after=5",
            DEADLINE,
            "unshare",
            "--map-root-user",
            "--net",
            "--pid",
            "--fork",
            "--kill-child",
        ])
        .args(["sh", "-c", "ip link set lo up && exec \"$@\"", "sh"])
        .args(command);
    isolated
}

/// A page as a shell script. It is stored in `run`, runs in `work`, and writes the number of its current block to `at`.
struct Script {
    run: PathBuf,
    text: String,
}

impl Script {
    fn new(folder: &Folder) -> Script {
        Script { run: folder.run.clone(), text: "tollkeeper_server=\n".to_owned() }
    }

    fn run(&mut self, block: &Block, status: i32, terminal: bool) {
        let (run, number) = (self.run.display(), block.number);
        let errors = if terminal { "&1".to_owned() } else { format!("'{run}/{number}.err'") };
        let begin = format!("echo {number} >'{run}/at'\nexec >'{run}/{number}.out' 2>{errors}\n");
        let steps = if serves(&block.text) {
            write(&self.run.join(format!("{number}.sh")), &format!("{} &\n", block.text.trim_end()));
            format!(
                "if [ -n \"$tollkeeper_server\" ]; then kill \"$tollkeeper_server\"; wait \"$tollkeeper_server\"; fi\n\
                 . '{run}/{number}.sh'\n\
                 tollkeeper_server=$!\n\
                 until grep -q '^listening ' '{run}/{number}.out'; do kill -0 \"$tollkeeper_server\"; sleep 0.02; done\n"
            )
        } else if status == 0 {
            format!(". '{run}/{number}.sh'\n")
        } else {
            format!(
                "status=0; bash -eu '{run}/{number}.sh' || status=$?\n\
                 [ \"$status\" = {status} ] || {{ echo \"exit status $status, expected {status}\" >&2; exit 1; }}\n"
            )
        };
        self.text += &(begin + &steps);
    }

    fn save(&mut self, file: &Path, name: &str) {
        self.text += &format!("cp '{}' '{name}'\n", file.display());
    }
}

/// Whether a block ends with a server in the foreground.
fn serves(block: &str) -> bool {
    let joined = block.replace("\\\n", " ");
    let last = joined.trim_end().lines().last().unwrap_or_default().trim();
    let server = ["tollkeeper serve", "tollkeeper proxy"].iter().any(|server| last.starts_with(server));
    server && !last.ends_with('&')
}

fn validate(page: &Page, block: &Block, language: Language, file: &Path) -> Result<(), String> {
    let policy = match language {
        Language::Yaml => block.text.lines().any(|line| line.starts_with("limits:")),
        Language::Toml => block.text.contains("[[limits]]"),
        // Responses of the server have `limits` too; a JSON policy is one that is saved to a file.
        _ => block.file.is_some() && block.text.contains("\"limits\""),
    };
    if !policy {
        let unused = language == Language::Yaml && block.file.is_none();
        return if unused { Err("this is not a policy and not saved as a file".to_owned()) } else { Ok(()) };
    }
    let report = output(Command::new(binary::tollkeeper()).arg("validate").arg(file))?;
    let quiet = !WITHOUT_WARNINGS.contains(&&*page.name) || report.contains(", 0 warnings");
    if quiet { Ok(()) } else { Err(report) }
}

fn check(command: &str, arguments: &[&str], file: &Path) -> Result<(), String> {
    output(Command::new(command).args(arguments).arg(file)).map(drop)
}

/// The output of a command: `Ok` if it succeeds, `Err` if it fails.
fn output(command: &mut Command) -> Result<String, String> {
    let Output { status, stdout, stderr } = command
        .output()
        .map_err(|error| format!("`{}` is missing: {error}", command.get_program().display()))?;
    let text = format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    if status.success() { Ok(text) } else { Err(format!("{status}\n{text}")) }
}

fn write(file: &Path, text: &str) {
    fs::write(file, text).expect("`target` is writable");
}

fn ending(block: &Block) -> &'static str {
    match block.kind {
        Kind::Data(Language::Yaml) => "yaml",
        Kind::Data(Language::Toml) => "toml",
        Kind::Data(_) => "json",
        Kind::NotRun(Language::Go) => "go",
        _ => "sh",
    }
}

fn listed(mistakes: &[Mistake]) -> String {
    mistakes.iter().map(|mistake| format!("\n{mistake}\n")).collect()
}

/// The working folder of a page, and the folder of its script. Removed on drop.
struct Folder {
    root: PathBuf,
    run: PathBuf,
    work: PathBuf,
}

impl Folder {
    fn new() -> Folder {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("docs-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let (run, work) = (root.join("run"), root.join("work"));
        for folder in [&run, &work] {
            fs::create_dir_all(folder).expect("`target` is writable");
        }
        Folder { root, run, work }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // If this fails, the rest stays in `target`.
        drop(fs::remove_dir_all(&self.root));
    }
}

// Tests of the runner itself, on correct and wrong pages.

fn mistakes(text: &str) -> String {
    listed(&follow(&Page::parse("page.md", text).expect("a page")))
}

#[test]
fn machine_supports_network_namespaces() {
    let tried = isolated(&["true"]).output();
    let reason = match &tried {
        Ok(output) if output.status.success() => return,
        Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
        Err(error) => error.to_string(),
    };
    panic!(
        "documentation pages use 127.0.0.1:8080, so each runs in its own network namespace, which this machine does \
         not allow: {reason}\nIt takes `unshare` (Debian: util-linux), `ip` (iproute2), and user namespaces: in a container \
         `--security-opt seccomp=unconfined` or `--privileged`, on Ubuntu \
         `sysctl kernel.apparmor_restrict_unprivileged_userns=0`"
    );
}

#[test]
fn blocks_of_a_page_share_a_shell_and_a_folder() {
    let right = "Save this as `a.json`:\n```json\n1\n```\n```sh\nname=alice\ncat a.json\n```\n```text\n1\n```\n\
                 ```sh\necho $name; echo low >&2\n```\n```console\nal…\nlow\n```\n```sh exit=3\nexit 3\n```\n";
    assert_eq!(mistakes(right), "");
    assert_eq!(mistakes("```sh\nls\n```\n```text\n```\n"), "", "each page starts with an empty folder");
}

#[test]
fn wrong_page_is_reported_with_its_line() {
    for (page, expected) in [
        ("```sh\ntrue\n```\n\n```sh\nfalse\n```\n", "page.md:5 (block 2): failed (exit status: 1)"),
        ("```sh\necho $unset\n```\n", "page.md:1 (block 1): failed"),
        (
            "```sh\necho 1\n```\n```text\n2\n```\n",
            "page.md:1 (block 1): the output differs from what line 4 shows:\n2\n",
        ),
        ("```sh exit=2\nexit 1\n```\n", "exit status 1, expected 2"),
        ("```sh setup\nif\n```\n", "page.md:1 (block 1): exit status: 2"),
        ("checked, not run\n```go checked-not-run\npackage\n```\n", "page.md:2 (block 1): exit status"),
        ("```yaml\nname: value\n```\n", "page.md:1 (block 1): this is not a policy and not saved as a file"),
        ("```yaml\nlimits: none\n```\n", "page.md:1 (block 1): exit status: 1"),
        ("Save this as `a.json`:\n```json\n{\"limits\":0}\n```\n", "page.md:2 (block 1): exit status: 1"),
        ("```toml\n[[limits]]\nname = 0\n```\n", "page.md:1 (block 1): exit status: 1"),
        ("```sh\ntollkeeper serve --config none.yaml\n```\n", "page.md:1 (block 1): failed"),
    ] {
        let found = mistakes(page);
        assert!(found.contains(expected), "{page}\nexpected: {expected}\nfound: {found}");
    }
}

#[test]
fn foreground_server_runs_until_next_or_end_of_page() {
    let page = "```sh\ntollkeeper serve\n```\n```text\nlistening http=127.0.0.1:8080\n…\n```\n\
                ```sh\ncurl -sf http://127.0.0.1:8080/healthz >/dev/null\n```\n\
                ```sh\ntollkeeper serve \\\n  --http 127.0.0.1:8080\n```\n\
                ```sh\ncurl -sf http://127.0.0.1:8080/healthz >/dev/null\n```\n";
    assert_eq!(mistakes(page), "");
}
