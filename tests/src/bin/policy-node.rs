//! A process that follows the shared limits: the child of `tests/redis_policy.rs`.
//!
//! Prints its quota and its version, at the start and whenever they change.

use std::error::Error;
use std::io::{Write, stdout};

use tollkeeper_tests::policy_node::PolicyNode;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::args().nth(1).ok_or("usage: policy-node URL")?;
    let mut node = PolicyNode::start(&url).await;
    loop {
        let (count, version) = node.grants();
        writeln!(stdout(), "{count} {version}")?;
        node.changed().await;
    }
}
