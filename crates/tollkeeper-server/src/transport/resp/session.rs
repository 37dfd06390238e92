//! The state of one connection (id, name, authentication), and the commands that Redis clients send to set it up.

use super::Resp;
use super::commands::{self, CommandRow, Name};
use super::parse::Arguments;
use super::reply::{Protocol, Replies};

/// The state of one connection.
#[derive(Debug)]
pub(super) struct Session {
    id: u64,
    name: Vec<u8>,
    /// Whether the client has sent a valid token.
    admitted: bool,
    /// Whether the connection is to be closed after the replies to all commands so far.
    pub(super) ending: bool,
}

/// The Redis version that is reported to clients, so that they do not use commands of later versions.
const REDIS: &str = "7.0.0";

/// Settings that tools read. `save` is empty, because there is nothing to save.
const SETTINGS: [(&str, &str); 4] =
    [("save", ""), ("appendonly", "no"), ("databases", "1"), ("maxmemory", "0")];

impl Session {
    /// The state of a new connection.
    pub(super) fn new(resp: &Resp) -> Session {
        Session { id: resp.number(), name: Vec::new(), admitted: false, ending: false }
    }

    /// Whether commands are allowed. A reload can add tokens: from then on, open connections must authenticate, too.
    pub(super) fn may_ask(&self, resp: &Resp) -> bool {
        self.admitted || !resp.needs_token()
    }

    /// Replies to every command but checks and `DEL`.
    pub(super) fn answer(
        &mut self,
        resp: &Resp,
        entry: &CommandRow,
        arguments: Arguments<'_>,
        out: &mut Replies,
    ) {
        let word = |at| arguments.get(at).unwrap_or_default();
        match entry.what {
            Name::Ping if arguments.len() == 1 => out.simple("PONG"),
            Name::Ping | Name::Echo => out.bulk(word(1)),
            Name::Auth => match self.authenticate(resp, word(arguments.len() - 1)) {
                Ok(()) => out.simple("OK"),
                Err(refused) => out.error(refused),
            },
            Name::Hello => self.hello(resp, arguments, out),
            Name::Select => match number(word(1)) {
                Some(0) => out.simple("OK"),
                Some(_) => out.error("ERR DB index is out of range"),
                None => out.error("ERR invalid DB index"),
            },
            Name::Client => self.client(arguments, out),
            Name::Command => match arguments.get(1).map(<[u8]>::to_ascii_lowercase).as_deref() {
                None => commands::describe(out, arguments.from(1)),
                Some(b"info") => commands::describe(out, arguments.from(2)),
                Some(b"docs") => commands::document(out, arguments.from(2)),
                Some(b"count") => commands::count(out),
                Some(_) => unknown(entry, word(1), out),
            },
            Name::Config if word(1).eq_ignore_ascii_case(b"GET") => settings(arguments, out),
            Name::Config => unknown(entry, word(1), out),
            Name::Info => out.bulk(info(resp).as_bytes()),
            Name::Quit => {
                out.simple("OK");
                self.ending = true;
            }
            Name::Reset => {
                out.protocol = Protocol::Resp2;
                self.name.clear();
                self.admitted = false;
                out.simple("RESET");
            }
            Name::ClThrottle | Name::Throttle | Name::TkCheck | Name::TkPeek | Name::Del => {
                unreachable!("handled by the connection")
            }
        }
    }

    /// `HELLO [2|3 [AUTH name password] [SETNAME name]]`.
    fn hello(&mut self, resp: &Resp, arguments: Arguments<'_>, out: &mut Replies) {
        let protocol = match arguments.get(1).map(number) {
            None => out.protocol,
            Some(Some(2)) => Protocol::Resp2,
            Some(Some(3)) => Protocol::Resp3,
            Some(Some(_)) => return out.error("NOPROTO unsupported protocol version"),
            Some(None) => return out.error("ERR Protocol version is not an integer or out of range"),
        };
        let mut options = arguments.from(2);
        let mut name = None;
        while let Some(option) = options.next() {
            let result = match &option.to_ascii_lowercase()[..] {
                b"auth" => {
                    options.next();
                    let password = options.next().ok_or(SYNTAX);
                    password.and_then(|password| self.authenticate(resp, password))
                }
                b"setname" => options.next().ok_or(SYNTAX).map(|word| name = Some(word)),
                _ => Err(SYNTAX),
            };
            if let Err(refused) = result {
                return out.error(refused);
            }
        }
        if !self.may_ask(resp) {
            return out.error(
                "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO \
                 <proto> AUTH <user> <pass> option can be used to authenticate the client and select the RESP \
                 protocol version at the same time",
            );
        }
        if let Some(name) = name {
            self.name = name.to_vec();
        }
        out.protocol = protocol;
        out.map(7);
        out.bulk(b"server");
        out.bulk(b"tollkeeper");
        out.bulk(b"version");
        out.bulk(env!("CARGO_PKG_VERSION").as_bytes());
        out.bulk(b"proto");
        out.number(if protocol == Protocol::Resp3 { 3 } else { 2 });
        out.bulk(b"id");
        out.number(self.id);
        out.bulk(b"mode");
        out.bulk(b"standalone");
        out.bulk(b"role");
        out.bulk(b"master");
        out.bulk(b"modules");
        out.array(0);
    }

    /// Authenticates with a token as the password. The user name is ignored.
    fn authenticate(&mut self, resp: &Resp, password: &[u8]) -> Result<(), &'static str> {
        if !resp.needs_token() {
            return Err(
                "ERR AUTH <password> called without any password configured for the default user. Are you sure \
                 your configuration is correct?",
            );
        }
        if !resp.admits(password) {
            return Err("WRONGPASS invalid username-password pair or user is disabled.");
        }
        self.admitted = true;
        Ok(())
    }

    fn client(&mut self, arguments: Arguments<'_>, out: &mut Replies) {
        let word = |at| arguments.get(at).unwrap_or_default();
        match (&word(1).to_ascii_lowercase()[..], arguments.len()) {
            (b"setinfo", 4) => out.simple("OK"),
            (b"setname", 3) if word(2).iter().all(u8::is_ascii_graphic) => {
                self.name = word(2).to_vec();
                out.simple("OK");
            }
            (b"setname", 3) => {
                out.error("ERR Client names cannot contain spaces, newlines or special characters.");
            }
            (b"getname", 2) if self.name.is_empty() => out.null(),
            (b"getname", 2) => out.bulk(&self.name),
            (b"id", 2) => out.number(self.id),
            (b"setinfo" | b"setname" | b"getname" | b"id", _) => {
                let name = String::from_utf8_lossy(word(1)).to_ascii_lowercase();
                out.error(&format!("ERR wrong number of arguments for 'client|{name}' command"));
            }
            _ => out.error(&format!("ERR unknown subcommand '{}'", shown(word(1)))),
        }
    }
}

const SYNTAX: &str = "ERR Syntax error in HELLO (try HELLO 3 AUTH name password SETNAME name)";

fn unknown(entry: &CommandRow, word: &[u8], out: &mut Replies) {
    out.error(&format!("ERR unknown subcommand '{}' of '{}'", shown(word), entry.name));
}

/// The first 128 bytes of client input, for error messages.
pub(super) fn shown(word: &[u8]) -> String {
    String::from_utf8_lossy(&word[..word.len().min(128)]).into_owned()
}

fn number(word: &[u8]) -> Option<u64> {
    std::str::from_utf8(word).ok()?.parse().ok()
}

fn settings(arguments: Arguments<'_>, out: &mut Replies) {
    let requested = |name: &str| arguments.from(2).any(|word| word == b"*" || word == name.as_bytes());
    let shown: Vec<_> = SETTINGS.iter().filter(|(name, _)| requested(name)).collect();
    out.map(shown.len());
    for (name, value) in shown {
        out.bulk(name.as_bytes());
        out.bulk(value.as_bytes());
    }
}

fn info(resp: &Resp) -> String {
    let (version, uptime) = (env!("CARGO_PKG_VERSION"), resp.began.elapsed().as_secs());
    let (process, clients) = (std::process::id(), resp.connected());
    format!(
        "# Server\r\nredis_version:{REDIS}\r\nredis_mode:standalone\r\ntollkeeper_version:{version}\r\n\
         process_id:{process}\r\nuptime_in_seconds:{uptime}\r\n\r\n# Clients\r\nconnected_clients:{clients}\r\n\r\n\
         # Persistence\r\nloading:0\r\n\r\n# Replication\r\nrole:master\r\nconnected_slaves:0\r\n"
    )
}
