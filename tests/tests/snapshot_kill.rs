//! A process killed while it saves leaves a complete snapshot: the previous one or the one it was writing.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use tollkeeper::{Capacity, MemoryStore};
use tollkeeper_tests::snapshot_fixture::{self, KEYS};

const KILLS: usize = 100;

#[test]
fn killed_process_leaves_a_complete_snapshot() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("killed-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let file = folder.join("state");
    let mut random = Random(0x746f_6c6c);
    let (mut in_flight, mut interrupted) = (0, 0);
    let mut saved = 0;
    for kill in 0..KILLS {
        let mut child = Command::new(env!("CARGO_BIN_EXE_snapshot-writer"))
            .arg(&file)
            .stdout(Stdio::piped())
            .spawn()
            .expect("cargo builds the writer for this test");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let mut line =
            || lines.next().expect("it writes until it is killed").unwrap().parse::<u64>().unwrap();
        assert_eq!(line(), saved, "it continues where the last process was killed");
        // Kill after a few completed saves, at a random point between two of them.
        for _ in 0..=random.below(3) {
            saved = line();
        }
        for _ in 0..random.below(400_000) {
            std::hint::spin_loop();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        // The last line still in the pipe: the last save that is known to be complete.
        let mut rest = String::new();
        for line in lines {
            rest = line.unwrap();
        }
        let completed = rest.parse().unwrap_or(saved);

        let store = MemoryStore::load(Capacity::default(), snapshot_fixture::clock(), &file)
            .unwrap_or_else(|error| panic!("kill {kill}: {error}"));
        assert_eq!(store.keys() as u64, KEYS);
        saved = snapshot_fixture::units(&store).unwrap();
        assert!(saved == completed || saved == completed + 1, "kill {kill}: {saved} after {completed}");
        in_flight += usize::from(saved > completed);
        interrupted += usize::from(folder.join("state.new").exists());
    }
    println!("{KILLS} kills: {interrupted} while a file was written, {in_flight} after it was renamed");
    assert!(interrupted > 0, "no kill interrupted a write, so nothing was tested");
    fs::remove_dir_all(&folder).unwrap();
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}
