//! A private CA and its certificates, created with `openssl` on demand.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::redis::folder;

/// A CA in a temporary folder, which is removed on drop.
#[derive(Debug)]
pub struct Authority {
    folder: PathBuf,
}

impl Authority {
    /// Creates a CA.
    pub fn new() -> Authority {
        let folder = folder();
        let name = folder.file_name().expect("a folder name").to_string_lossy().into_owned();
        openssl(
            &folder,
            &format!(
                "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN={name} \
                 -addext basicConstraints=critical,CA:TRUE -keyout ca.key -out ca.pem"
            ),
        );
        Authority { folder }
    }

    /// Issues a certificate for this name and these alternative names (`IP:127.0.0.1`), with its key.
    pub fn certify(&self, name: &str, alternatives: &str) -> (PathBuf, PathBuf) {
        fs::write(self.folder.join("extensions"), format!("subjectAltName={alternatives}"))
            .expect("the temporary folder is writable");
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

    /// The certificate of the CA.
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
