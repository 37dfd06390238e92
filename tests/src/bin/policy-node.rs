//! A process that follows the limits which all nodes share: the child of `tests/redis_policy.rs`.
//!
//! Prints what it grants and under which version, at once and whenever that changes.

use std::error::Error;
use std::io::{Write, stdout};

use tollkeeper_tests::policy_node::PolicyNode;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::args().nth(1).ok_or("which server?")?;
    let mut node = PolicyNode::start(&url).await;
    loop {
        let (count, version) = node.grants();
        writeln!(stdout(), "{count} {version}")?;
        node.changed().await;
    }
}
