//! The `tollkeeper` binary: parses arguments and runs a subcommand.

use std::io;
use std::process::ExitCode;

use clap::Parser as _;
use tollkeeper_server::command;
use tollkeeper_server::command::args::{Arguments, Command};

fn main() -> ExitCode {
    let done = match Arguments::parse().command {
        Command::Serve(args) => command::serve::run(*args),
        Command::Proxy(args) => command::proxy::run(*args),
        Command::Check(args) => command::check::run(&args),
        Command::Explain(args) => command::explain::run(&args),
        Command::Usage(args) => command::usage::run(&args),
        Command::Unblock(args) => command::unblock::run(&args),
        Command::Limits(args) => command::limits::run(&args),
        Command::Override(args) => command::overrides::run(&args),
        Command::Top(args) => command::top::run(&args),
        Command::Demo(args) => command::demo::run(&args),
        Command::Validate(args) => command::validate::run(&args),
        Command::Verify(args) => command::verify::run(&args),
        Command::Schema => command::schema::run(),
        Command::Init { name, tests } => command::init::run(name.as_deref(), tests),
        Command::Test(args) => command::test::run(&args),
        Command::Simulate(args) => command::simulate::run(&args),
        Command::Completions { shell } => command::completions::run(shell),
    };
    done.unwrap_or_else(|error| match error.downcast_ref::<io::Error>() {
        // The reader closed the pipe, as `head` does.
        Some(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        _ => {
            eprintln!("tollkeeper: {error:#}");
            ExitCode::from(2)
        }
    })
}
