//! What can be called: names, how many words they take, and what Redis clients ask about them.

use super::reply::Replies;

/// A command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Name {
    /// A limit that travels with the call, as redis-cell has it.
    ClThrottle,
    /// The policy, asked.
    TkCheck,
    /// The policy, asked without paying.
    TkPeek,
    /// A limit that travels with the call, as throttlecrab has it.
    Throttle,
    /// Keys of the two, forgotten.
    Del,
    /// Whether somebody is there.
    Ping,
    /// The same back.
    Echo,
    /// A password.
    Auth,
    /// The version of the protocol.
    Hello,
    /// A database: there is one.
    Select,
    /// What a client says of itself.
    Client,
    /// These commands.
    Command,
    /// Settings of Redis, where a tool asks for them.
    Config,
    /// What a tool wants to know of a server.
    Info,
    /// The end.
    Quit,
    /// A beginning.
    Reset,
}

/// What is known of a command.
#[derive(Debug)]
pub struct Entry {
    /// What it is called.
    pub name: &'static str,
    /// Which it is.
    pub what: Name,
    /// The fewest and the most words, its own among them.
    words: (usize, usize),
    /// The places of its keys: first, last and the distance between two.
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
) -> Entry {
    Entry { name, what, words, keys, summary }
}

const NONE: (u64, i64, u64) = (0, 0, 0);
const ONE: (u64, i64, u64) = (1, 1, 1);

/// Every command, the busiest first.
static ALL: [Entry; 16] = [
    entry("cl.throttle", Name::ClThrottle, (5, 6), ONE, "Decides by a limit that comes with the call"),
    entry("tk.check", Name::TkCheck, (1, MANY), NONE, "Decides by the limits of the policy, and charges"),
    entry("throttle", Name::Throttle, (5, 6), ONE, "Decides by a limit that comes with the call"),
    entry("tk.peek", Name::TkPeek, (1, MANY), NONE, "Says what a check would, and charges nothing"),
    entry("ping", Name::Ping, (1, 2), NONE, "Answers"),
    entry("del", Name::Del, (2, MANY), (1, -1, 1), "Forgets keys of CL.THROTTLE and THROTTLE"),
    entry("echo", Name::Echo, (2, 2), NONE, "Answers with what it was given"),
    entry("auth", Name::Auth, (2, 3), NONE, "Takes a token as the password"),
    entry("hello", Name::Hello, (1, 7), NONE, "Chooses the version of the protocol"),
    entry("select", Name::Select, (2, 2), NONE, "Takes database 0"),
    entry("client", Name::Client, (2, MANY), NONE, "Says something of a connection"),
    entry("command", Name::Command, (1, MANY), NONE, "Says something of commands"),
    entry("config", Name::Config, (2, MANY), NONE, "Shows what tools ask for"),
    entry("info", Name::Info, (1, MANY), NONE, "Says something of the server"),
    entry("quit", Name::Quit, (1, MANY), NONE, "Ends a connection"),
    entry("reset", Name::Reset, (1, 1), NONE, "Makes a connection as good as new"),
];

/// The command that a client calls so.
#[inline]
pub fn find(name: &[u8]) -> Option<&'static Entry> {
    ALL.iter().find(|entry| name.eq_ignore_ascii_case(entry.name.as_bytes()))
}

impl Entry {
    /// Whether it takes so many words, its own among them.
    pub fn takes(&self, words: usize) -> bool {
        (self.words.0..=self.words.1).contains(&words)
    }

    /// Whether it may be called by who has not said the password.
    pub fn is_open(&self) -> bool {
        matches!(self.what, Name::Auth | Name::Hello | Name::Quit | Name::Reset)
    }

    /// As `COMMAND` lists it: name, number of words, flags, keys, and what Redis 7 has behind them.
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

/// `COMMAND`, `COMMAND INFO`.
pub fn describe<'n>(out: &mut Replies, names: impl ExactSizeIterator<Item = &'n [u8]>) {
    if names.len() == 0 {
        out.array(ALL.len());
        return ALL.iter().for_each(|entry| entry.describe(out));
    }
    out.array(names.len());
    names.for_each(|name| out.or_null(find(name), |out, entry| entry.describe(out)));
}

/// `COMMAND COUNT`.
pub fn count(out: &mut Replies) {
    out.number(ALL.len() as u64);
}

/// `COMMAND DOCS`.
pub fn document<'n>(out: &mut Replies, names: impl ExactSizeIterator<Item = &'n [u8]>) {
    let all = names.len() == 0;
    let named: Vec<&Entry> = if all { ALL.iter().collect() } else { names.filter_map(find).collect() };
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
