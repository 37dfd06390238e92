//! Parses documentation pages into code blocks, and compares real output with the output a page shows.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// A page, and its blocks in order.
pub struct Page {
    /// Path in the repository: `docs/choosing-limits.md`.
    pub name: String,
    /// The fenced blocks. Indented code is prose.
    pub blocks: Vec<Block>,
}

/// A fenced block.
#[derive(Clone, Debug)]
pub struct Block {
    /// The first on the page is 1.
    pub number: usize,
    /// The line of its fence.
    pub line: usize,
    /// The kind that its info string selects.
    pub kind: Kind,
    /// The file it is to be saved as: the line before it ends with a file name in backticks and a colon.
    pub file: Option<String>,
    /// The text between the fences.
    pub text: String,
}

/// What the tests do with a block, by its info string.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `sh`, `sh exit=N`: runs, and ends with that status.
    Run(i32),
    /// `sh setup`: done by the test command itself or by another test. Only its syntax is checked.
    Setup,
    /// `sh checked-not-run`, `go checked-not-run`: its syntax is checked, and the page must say so.
    NotRun(Language),
    /// `text` after a block that runs: its standard output. Anywhere else a drawing.
    Text,
    /// `console` after a block that runs: its standard output and standard error.
    Console,
    /// `yaml`, `toml`, `json`: perhaps a policy.
    Data(Language),
    /// `rust`, `js`, `ts`, `python`: a program with its own test.
    Program,
}

/// Language of a block, for the syntax check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Language {
    /// `sh`
    Sh,
    /// `go`
    Go,
    /// `yaml`
    Yaml,
    /// `toml`
    Toml,
    /// `json`
    Json,
}

impl Kind {
    fn of(info: &str) -> Result<Kind, String> {
        Ok(match info {
            "sh" => Kind::Run(0),
            "sh setup" => Kind::Setup,
            "sh checked-not-run" => Kind::NotRun(Language::Sh),
            "go checked-not-run" => Kind::NotRun(Language::Go),
            "text" => Kind::Text,
            "console" => Kind::Console,
            "yaml" => Kind::Data(Language::Yaml),
            "toml" => Kind::Data(Language::Toml),
            "json" => Kind::Data(Language::Json),
            "rust" | "js" | "ts" | "python" => Kind::Program,
            _ => match info.strip_prefix("sh exit=").map(str::parse) {
                Some(Ok(status @ 1..=255)) => Kind::Run(status),
                _ => {
                    return Err(format!(
                        "unknown block type `{info}`: use sh, sh exit=N, sh setup, sh checked-not-run, \
                         go checked-not-run, text, console, yaml, toml, json, rust, js, ts, python"
                    ));
                }
            },
        })
    }
}

/// An error in a page, with its location.
#[derive(Debug, PartialEq, Eq)]
pub struct Mistake {
    /// Page, line and block.
    pub place: String,
    /// Description of the error.
    pub what: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.what)
    }
}

impl Page {
    /// Every page that a user reads: the README and all of `docs`.
    pub fn all() -> Vec<(String, String)> {
        let root = root();
        let mut pages = vec![root.join("README.md")];
        let mut folders = vec![root.join("docs")];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).expect("a folder") {
                let path = entry.expect("readable").path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|extension| extension == "md") {
                    pages.push(path);
                }
            }
        }
        pages.sort();
        let name = |path: &Path| path.strip_prefix(&root).expect("inside").display().to_string();
        pages.iter().map(|path| (name(path), fs::read_to_string(path).expect("a page is text"))).collect()
    }

    /// Parses a page.
    pub fn parse(name: &str, text: &str) -> Result<Page, Mistake> {
        let mut blocks: Vec<Block> = Vec::new();
        // The prose since the last block, and before it: the note may be on either side of a block.
        let mut prose = String::new();
        let mut missing_note: Option<(usize, usize)> = None;
        let mut lines = text.lines().enumerate();
        while let Some((index, line)) = lines.next() {
            let Some(info) = line.trim_start().strip_prefix("```") else {
                prose.push_str(line);
                prose.push('\n');
                continue;
            };
            let (number, line_number, indent) =
                (blocks.len() + 1, index + 1, line.len() - line.trim_start().len());
            let mistake = |what| Mistake { place: place(name, number, line_number), what };
            let mut block = String::new();
            loop {
                let (_, line) = lines.next().ok_or_else(|| mistake("this block is not closed".to_owned()))?;
                if line.trim() == "```" {
                    break;
                }
                block.push_str(line.get(indent..).unwrap_or_default());
                block.push('\n');
            }
            let kind = Kind::of(info.trim()).map_err(mistake)?;
            check_note(name, missing_note.take(), &prose)?;
            if matches!(kind, Kind::NotRun(_)) && !prose.contains(NOT_RUN) {
                missing_note = Some((number, line_number));
            }
            let file = prose.trim_end().lines().last().and_then(file_named).map(str::to_owned);
            blocks.push(Block { number, line: line_number, kind, file, text: block });
            prose.clear();
        }
        check_note(name, missing_note, &prose)?;
        Ok(Page { name: name.to_owned(), blocks })
    }

    /// The location of a block: `docs/http.md:12 (block 3)`.
    pub fn place(&self, block: &Block) -> String {
        place(&self.name, block.number, block.line)
    }

    /// The block that is saved as this file.
    pub fn file(&self, name: &str) -> &Block {
        let found = self.blocks.iter().find(|block| block.file.as_deref() == Some(name));
        found.unwrap_or_else(|| panic!("{} has no block that is saved as `{name}`", self.name))
    }

    /// What the page shows as the output of this block.
    pub fn shown(&self, block: &Block) -> Option<&Block> {
        let next = self.blocks.get(block.number)?;
        let runs = matches!(block.kind, Kind::Run(_));
        (runs && matches!(next.kind, Kind::Text | Kind::Console)).then_some(next)
    }
}

const NOT_RUN: &str = "checked, not run";

fn check_note(page: &str, missing_note: Option<(usize, usize)>, prose: &str) -> Result<(), Mistake> {
    match missing_note {
        Some((number, line)) if !prose.contains(NOT_RUN) => Err(Mistake {
            place: place(page, number, line),
            what: format!("the text next to this block does not say \"{NOT_RUN}\""),
        }),
        _ => Ok(()),
    }
}

fn place(page: &str, number: usize, line: usize) -> String {
    format!("{page}:{line} (block {number})")
}

/// ``Save this as `tollkeeper.yaml`:`` names a file.
fn file_named(line: &str) -> Option<&str> {
    let (_, name) = line.strip_suffix("`:")?.rsplit_once('`')?;
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    (name.contains('.') && name.chars().all(plain)).then_some(name)
}

/// Whether an output matches the shown one: `…` matches anything within a line, a line of only `…` any lines.
pub fn as_shown(shown: &str, output: &str) -> bool {
    let lines =
        |text: &str| text.trim_end().lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>();
    matches(&lines(shown), &lines(output), &|line| line == "…", &|shown, line| {
        let characters = |line: &str| line.chars().collect::<Vec<_>>();
        matches(&characters(shown), &characters(line), &|c| *c == '…', &|a, b| a == b)
    })
}

/// Wildcard matching, both for lines and for the characters of a line.
fn matches<T>(shown: &[T], output: &[T], any: &dyn Fn(&T) -> bool, same: &dyn Fn(&T, &T) -> bool) -> bool {
    match shown.split_first() {
        None => output.is_empty(),
        Some((first, rest)) if any(first) => {
            (0..=output.len()).any(|skipped| matches(rest, &output[skipped..], any, same))
        }
        Some((first, rest)) => output
            .split_first()
            .is_some_and(|(head, tail)| same(first, head) && matches(rest, tail, any, same)),
    }
}

/// The folder of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("`tests` is in the repository").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(text: &str) -> Vec<Kind> {
        Page::parse("page.md", text).unwrap().blocks.iter().map(|block| block.kind).collect()
    }

    fn mistake(text: &str) -> String {
        Page::parse("page.md", text).err().expect("a mistake").to_string()
    }

    #[test]
    fn page_parses_into_blocks_with_locations() {
        let page = Page::parse(
            "page.md",
            "# Title\n\n```sh\necho\n```\n\n- item:\n\n  ```yaml\n  a:\n    b\n  ```\n",
        )
        .unwrap();
        let found: Vec<_> = page.blocks.iter().map(|block| (block.line, block.kind, &*block.text)).collect();
        assert_eq!(found, [(3, Kind::Run(0), "echo\n"), (9, Kind::Data(Language::Yaml), "a:\n  b\n")]);
        assert_eq!(page.place(&page.blocks[1]), "page.md:9 (block 2)");
    }

    #[test]
    fn info_string_selects_the_block_kind() {
        assert_eq!(kinds("```sh exit=1\n```\n"), [Kind::Run(1)]);
        assert_eq!(kinds("```sh setup\n```\n```rust\n```\n"), [Kind::Setup, Kind::Program]);
        for unknown in ["bash", "", "sh exit=0", "sh exit=x", "yml"] {
            let message = mistake(&format!("text\n```{unknown}\n```\n"));
            assert!(
                message.starts_with(&format!("page.md:2 (block 1): unknown block type `{unknown}`")),
                "{message}"
            );
        }
        assert_eq!(mistake("```sh\n"), "page.md:1 (block 1): this block is not closed");
    }

    #[test]
    fn block_not_run_must_be_marked_in_the_text() {
        let missing_note =
            "page.md:1 (block 1): the text next to this block does not say \"checked, not run\"";
        assert_eq!(mistake("```sh checked-not-run\n```\n"), missing_note);
        assert_eq!(mistake("```sh checked-not-run\n```\n```sh\n```\nchecked, not run\n"), missing_note);
        for message in [
            "It is checked, not run:\n```sh checked-not-run\n```\n",
            "```sh checked-not-run\n```\n(checked, not run)\n",
        ] {
            assert_eq!(kinds(message), [Kind::NotRun(Language::Sh)]);
        }
    }

    #[test]
    fn line_before_a_block_names_its_file() {
        let named = |line: &str| {
            Page::parse("page.md", &format!("{line}\n\n```yaml\n```\n")).unwrap().blocks[0].file.clone()
        };
        assert_eq!(named("Save this as `tollkeeper.yaml`:").as_deref(), Some("tollkeeper.yaml"));
        for unnamed in
            ["As `tollkeeper.yaml` says:", "`tollkeeper.yaml`", "As `limits`:", "In `../a.yaml`:", ""]
        {
            assert_eq!(named(unnamed), None, "{unnamed}");
        }
    }

    #[test]
    fn block_after_a_run_block_is_its_expected_output() {
        let page = Page::parse(
            "page.md",
            "```sh\n```\n```text\na\n```\n```text\nb\n```\n```sh setup\n```\n```text\n```\n",
        )
        .unwrap();
        let shown: Vec<_> =
            page.blocks.iter().map(|block| page.shown(block).map(|shown| &*shown.text)).collect();
        assert_eq!(shown, [Some("a\n"), None, None, None, None]);
    }

    #[test]
    fn ellipsis_matches_anything() {
        assert!(as_shown("a\nb\n", "a\nb"));
        assert!(as_shown("a  \n", "a\n\n"));
        assert!(as_shown("port …\n", "port 8080\n") && as_shown("a…c…e", "abcde") && as_shown("a…", "a"));
        assert!(as_shown("…\nb\n…\n", "b\n") && as_shown("…\nb\n…\n", "x\ny\nb\nz\n"));
        for (shown, output) in
            [("a", "b"), ("a", "a\nb"), ("a\nb", "a"), ("a…c", "ab"), ("a…\nb", "a\nx\nb"), ("", "a")]
        {
            assert!(!as_shown(shown, output), "{shown} is not {output}");
        }
    }
}
