//! Certificates that nobody else trusts, made by `openssl` when they are needed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::redis::folder;

/// An authority, in a folder that goes with it.
#[derive(Debug)]
pub struct Authority {
    folder: PathBuf,
}

impl Authority {
    /// Makes one.
    pub fn new() -> Authority {
        let folder = folder();
        let name = folder.file_name().expect("it has a name").to_string_lossy().into_owned();
        openssl(
            &folder,
            &format!(
                "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN={name} \
                 -addext basicConstraints=critical,CA:TRUE -keyout ca.key -out ca.pem"
            ),
        );
        Authority { folder }
    }

    /// Has a certificate made for this name and these alternatives (`IP:127.0.0.1`), and its key.
    pub fn certify(&self, name: &str, alternatives: &str) -> (PathBuf, PathBuf) {
        fs::write(self.folder.join("extensions"), format!("subjectAltName={alternatives}"))
            .expect("a folder of one's own");
        openssl(
            &self.folder,
            &format!(
                "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN={name} -keyout {name}.key \
                 -out {name}.request"
            ),
        );
        openssl(
            &self.folder,
            &format!(
                "x509 -req -in {name}.request -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile extensions \
                 -out {name}.pem"
            ),
        );
        (self.folder.join(format!("{name}.pem")), self.folder.join(format!("{name}.key")))
    }

    /// Its own certificate.
    pub fn certificate(&self) -> PathBuf {
        self.folder.join("ca.pem")
    }
}

impl Default for Authority {
    fn default() -> Authority {
        Authority::new()
    }
}

impl Drop for Authority {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn openssl(folder: &Path, arguments: &str) {
    let made = Command::new("openssl")
        .args(arguments.split_whitespace())
        .current_dir(folder)
        .output()
        .expect("openssl is installed (`make test` installs what it needs)");
    assert!(made.status.success(), "openssl {arguments}: {}", String::from_utf8_lossy(&made.stderr));
}
