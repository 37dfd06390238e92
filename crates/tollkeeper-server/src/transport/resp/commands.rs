//! The command table: names, numbers of arguments, and the descriptions that Redis clients ask for.

use super::reply::Replies;

/// A command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Name {
    /// Checks a limit given in the command, as redis-cell does.
    ClThrottle,
    /// Checks the limits of the policy.
    TkCheck,
    /// Checks the limits of the policy without charging.
    TkPeek,
    /// Checks a limit given in the command, as throttlecrab does.
    Throttle,
    /// Deletes keys of `CL.THROTTLE` and `THROTTLE`.
    Del,
    /// Tests the connection.
    Ping,
    /// Returns its argument.
    Echo,
    /// Authenticates with a token as the password.
    Auth,
    /// Selects the protocol version.
    Hello,
    /// Selects a database: there is only 0.
    Select,
    /// Names the connection or the client library.
    Client,
    /// Describes these commands.
    Command,
    /// Shows the Redis settings that tools read.
    Config,
    /// Shows the server information that tools read.
    Info,
    /// Closes the connection.
    Quit,
    /// Resets the state of the connection.
    Reset,
}

/// One row of the command table.
#[derive(Debug)]
pub struct CommandRow {
    /// Its name in lower case: `cl.throttle`.
    pub name: &'static str,
    /// Its identifier.
    pub what: Name,
    /// The fewest and the most words, including the name of the command.
    words: (usize, usize),
    /// Positions of its keys, as `COMMAND INFO` reports them: first, last and step.
    keys: (u64, i64, u64),
    summary: &'static str,
}

const MANY: usize = usize::MAX;

const fn entry(
    name: &'static str,
    what: Name,
    words: (usize, usize),
    keys: (u64, i64, u64),
    summary: &'static str,
) -> CommandRow {
    CommandRow { name, what, words, keys, summary }
}

const NONE: (u64, i64, u64) = (0, 0, 0);
const ONE: (u64, i64, u64) = (1, 1, 1);

/// Every command. They are searched in this order, so the most frequent come first.
static ALL: [CommandRow; 16] = [
    entry("cl.throttle", Name::ClThrottle, (5, 6), ONE, "Checks a limit given in the command"),
    entry("tk.check", Name::TkCheck, (1, MANY), NONE, "Checks the limits of the policy and charges them"),
    entry("throttle", Name::Throttle, (5, 6), ONE, "Checks a limit given in the command"),
    entry("tk.peek", Name::TkPeek, (1, MANY), NONE, "Checks the limits of the policy without charging them"),
    entry("ping", Name::Ping, (1, 2), NONE, "Tests the connection"),
    entry("del", Name::Del, (2, MANY), (1, -1, 1), "Deletes keys of CL.THROTTLE and THROTTLE"),
    entry("echo", Name::Echo, (2, 2), NONE, "Returns its argument"),
    entry("auth", Name::Auth, (2, 3), NONE, "Authenticates with a token as the password"),
    entry("hello", Name::Hello, (1, 7), NONE, "Selects the protocol version"),
    entry("select", Name::Select, (2, 2), NONE, "Selects a database (only 0)"),
    entry("client", Name::Client, (2, MANY), NONE, "Names the connection"),
    entry("command", Name::Command, (1, MANY), NONE, "Describes the commands"),
    entry("config", Name::Config, (2, MANY), NONE, "Shows settings"),
    entry("info", Name::Info, (1, MANY), NONE, "Shows server information"),
    entry("quit", Name::Quit, (1, MANY), NONE, "Closes the connection"),
    entry("reset", Name::Reset, (1, 1), NONE, "Resets the connection"),
];

/// Finds a command by its name, in upper or lower case.
#[inline]
pub fn find(name: &[u8]) -> Option<&'static CommandRow> {
    ALL.iter().find(|entry| name.eq_ignore_ascii_case(entry.name.as_bytes()))
}

impl CommandRow {
    /// Whether it accepts so many words, including its name.
    pub fn takes(&self, words: usize) -> bool {
        (self.words.0..=self.words.1).contains(&words)
    }

    /// Whether it may be called before authentication.
    pub fn is_open(&self) -> bool {
        matches!(self.what, Name::Auth | Name::Hello | Name::Quit | Name::Reset)
    }

    /// Its entry in the reply to `COMMAND`: name, arity, flags, keys, and four fields of Redis 7, which are empty.
    fn describe(&self, out: &mut Replies) {
        let (least, most) = self.words;
        let words = i64::try_from(least).expect("few");
        out.array(10);
        out.bulk(self.name.as_bytes());
        out.integer(if least == most { words } else { -words });
        out.array(1);
        out.simple("fast");
        let (first, last, distance) = self.keys;
        out.number(first);
        out.integer(last);
        out.number(distance);
        (0..4).for_each(|_| out.array(0));
    }
}

/// Replies to `COMMAND` and `COMMAND INFO`.
pub fn describe<'n>(out: &mut Replies, names: impl ExactSizeIterator<Item = &'n [u8]>) {
    if names.len() == 0 {
        out.array(ALL.len());
        return ALL.iter().for_each(|entry| entry.describe(out));
    }
    out.array(names.len());
    names.for_each(|name| out.or_null(find(name), |out, entry| entry.describe(out)));
}

/// Replies to `COMMAND COUNT`.
pub fn count(out: &mut Replies) {
    out.number(ALL.len() as u64);
}

/// Replies to `COMMAND DOCS`.
pub fn document<'n>(out: &mut Replies, names: impl ExactSizeIterator<Item = &'n [u8]>) {
    let all = names.len() == 0;
    let named: Vec<&CommandRow> = if all { ALL.iter().collect() } else { names.filter_map(find).collect() };
    out.map(named.len());
    for entry in named {
        out.bulk(entry.name.as_bytes());
        out.map(2);
        out.bulk(b"summary");
        out.bulk(entry.summary.as_bytes());
        out.bulk(b"group");
        out.bulk(b"generic");
    }
}
