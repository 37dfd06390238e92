//! What `top` knows: the last event, the rates of the last minute, the top keys, and what is selected.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use serde::Deserialize;

use crate::command::limits::ActiveLimit;

/// How many seconds a sparkline shows.
pub const SPARKS: usize = 60;
/// Over how many seconds rates are averaged.
const AVERAGED: usize = 10;

/// An event of `GET /v1/events`.
#[derive(Clone, Debug, Default, Deserialize)]
#[expect(missing_docs, reason = "the fields of the event")]
pub struct Event {
    pub t: u64,
    pub version: u64,
    pub source: String,
    pub shadowed: bool,
    pub error: Option<String>,
    pub requests: Requests,
    pub limits: BTreeMap<String, Counts>,
    pub store: Store,
    pub keys: u64,
    pub max_keys: u64,
}

/// Requests since the start.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[expect(missing_docs, reason = "the fields of the event")]
pub struct Requests {
    pub allowed: u64,
    pub refused: u64,
    pub degraded: u64,
}

/// The counts of a limit since the start.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[expect(missing_docs, reason = "the fields of the event")]
pub struct Counts {
    pub allowed: u64,
    pub refused: u64,
    pub would_refuse: u64,
    pub starved: u64,
}

/// The state of the store.
#[derive(Clone, Debug, Default, Deserialize)]
#[expect(missing_docs, reason = "the fields of the event")]
pub struct Store {
    pub state: String,
    pub p99_ms: Option<f64>,
}

/// `GET /v1/history`.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct History {
    requests: BTreeMap<String, Vec<Option<u64>>>,
    limits: BTreeMap<String, BTreeMap<String, Vec<Option<u64>>>>,
}

/// `GET /v1/top`.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct TopKeys {
    refused: Vec<KeyRow>,
}

/// A refused key.
#[derive(Clone, Debug, Deserialize)]
#[expect(missing_docs, reason = "the fields of the response")]
pub struct KeyRow {
    pub limit: String,
    pub key: Vec<Option<String>>,
    pub count: u64,
    pub error: u64,
    #[serde(rename = "ref")]
    pub name: Option<String>,
}

impl KeyRow {
    /// The values of the key in one line.
    pub fn shown(&self) -> String {
        let values: Vec<&str> = self.key.iter().map(|value| value.as_deref().unwrap_or("-")).collect();
        if values.is_empty() { "(all)".to_owned() } else { values.join(" ").escape_debug().to_string() }
    }
}

/// The answer of DELETE.
#[derive(Clone, Copy, Debug, Deserialize)]
#[expect(missing_docs, reason = "the field of the response")]
pub struct Done {
    pub done: bool,
}

/// What a key press asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Nothing more than to draw again.
    Nothing,
    /// To end the command.
    Quit,
    /// To forget a key.
    Unblock {
        /// Its reference.
        name: String,
        /// The key in words.
        shown: String,
    },
}

/// What is shown.
#[derive(Debug)]
pub struct Model {
    /// The URL of the server.
    pub server: String,
    /// The last event; `None` before the first.
    pub event: Option<Event>,
    /// Why the numbers are old, if they are.
    pub since: Option<Instant>,
    /// The limit whose keys are shown; `None` for all limits.
    pub opened: Option<String>,
    /// The index of the selected row: limits first, then keys.
    pub selected: usize,
    /// What was typed in answer to "unblock?".
    pub prompt: Option<String>,
    /// The last line of the screen.
    pub message: String,
    limits: Vec<ActiveLimit>,
    version: u64,
    keys: Vec<KeyRow>,
    by_refused: bool,
    paused: bool,
    requests: Rates,
    rates: BTreeMap<String, Rates>,
}

/// Asked and refused in each of the last seconds, oldest first.
#[derive(Clone, Debug, Default)]
pub struct Rates(VecDeque<[u64; 2]>);

impl Rates {
    fn push(&mut self, counts: [u64; 2]) {
        self.0.push_back(counts);
        if self.0.len() > SPARKS {
            self.0.pop_front();
        }
    }

    /// Asked and refused per second, averaged over the last seconds.
    #[expect(clippy::cast_precision_loss, reason = "a rate to be shown")]
    pub fn per_second(&self) -> [f64; 2] {
        let last = self.0.len().min(AVERAGED);
        let sum = |index: usize| self.0.iter().rev().take(last).map(|counts| counts[index]).sum::<u64>();
        [0, 1].map(|index| sum(index) as f64 / last.max(1) as f64)
    }

    /// The refused requests of each second.
    pub fn refused(&self) -> impl ExactSizeIterator<Item = u64> {
        self.0.iter().map(|counts| counts[1])
    }
}

/// One row of the table of limits.
#[derive(Clone, Debug)]
pub struct LimitRow<'m> {
    /// The limit.
    pub limit: &'m ActiveLimit,
    /// Its rates.
    pub rates: Rates,
    /// Keys that are starved.
    pub starved: u64,
}

impl Model {
    /// Nothing is known yet.
    pub fn new(server: &str) -> Model {
        Model {
            server: server.to_owned(),
            event: None,
            since: None,
            opened: None,
            selected: 0,
            prompt: None,
            message: String::new(),
            limits: Vec::new(),
            version: 0,
            keys: Vec::new(),
            by_refused: false,
            paused: false,
            requests: Rates::default(),
            rates: BTreeMap::new(),
        }
    }

    /// The active limits.
    pub fn set_limits(&mut self, limits: Vec<ActiveLimit>) {
        self.limits = limits;
    }

    /// The rates before the first event.
    pub fn set_history(&mut self, history: &History) {
        let rates = |counts: &BTreeMap<String, Vec<Option<u64>>>| {
            let none = Vec::new();
            let of = |name: &str| counts.get(name).unwrap_or(&none).iter();
            let mut rates = Rates::default();
            let refused = of("refused").zip(of("would_refuse").chain(std::iter::repeat(&Some(0))));
            for (allowed, (refused, would)) in of("allowed").zip(refused) {
                if let (Some(allowed), Some(refused), Some(would)) = (allowed, refused, would) {
                    rates.push([allowed + refused + would, refused + would]);
                }
            }
            rates
        };
        self.requests = rates(&history.requests);
        self.rates = history.limits.iter().map(|(name, counts)| (name.clone(), rates(counts))).collect();
    }

    /// A new event. Counts below those of the last event are of a server that was restarted.
    pub fn set_event(&mut self, event: Event) {
        self.since = None;
        if self.paused {
            return;
        }
        if let Some(last) = &self.event {
            let more = |now: u64, before: u64| now.checked_sub(before).unwrap_or(now);
            let (now, before) = (event.requests, last.requests);
            let refused = more(now.refused, before.refused);
            let asked = more(now.allowed, before.allowed) + refused + more(now.degraded, before.degraded);
            self.requests.push([asked, refused]);
            for (name, now) in &event.limits {
                let before = last.limits.get(name).copied().unwrap_or_default();
                let refused = more(now.refused, before.refused) + more(now.would_refuse, before.would_refuse);
                let rates = self.rates.entry(name.clone()).or_default();
                rates.push([more(now.allowed, before.allowed) + refused, refused]);
            }
        }
        self.version = event.version;
        self.event = Some(event);
    }

    /// Whether the limits have changed since they were read.
    pub fn is_stale(&self, event: &Event) -> bool {
        self.version != event.version
    }

    /// The most refused keys.
    pub fn set_keys(&mut self, keys: TopKeys) {
        self.keys = keys.refused;
    }

    /// Shows a message until the next key press.
    pub fn say(&mut self, message: String) {
        self.message = message;
    }

    /// The connection was lost.
    pub fn disconnected(&mut self) {
        self.since.get_or_insert_with(Instant::now);
    }

    /// Whether updates are paused.
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// Whether limits are sorted by refused requests.
    pub fn is_by_refused(&self) -> bool {
        self.by_refused
    }

    /// Asked and refused requests per second.
    pub fn requests(&self) -> [f64; 2] {
        self.requests.per_second()
    }

    /// The limits that are shown, in order.
    pub fn limit_rows(&self) -> Vec<LimitRow<'_>> {
        let counts = |name: &str| self.event.as_ref().and_then(|event| event.limits.get(name)).copied();
        let shown =
            self.limits.iter().filter(|limit| self.opened.as_ref().is_none_or(|name| *name == limit.name));
        let mut rows: Vec<LimitRow<'_>> = shown
            .map(|limit| LimitRow {
                limit,
                rates: self.rates.get(&limit.name).cloned().unwrap_or_default(),
                starved: counts(&limit.name).unwrap_or_default().starved,
            })
            .collect();
        if self.by_refused {
            rows.sort_by(|one, other| other.rates.per_second()[1].total_cmp(&one.rates.per_second()[1]));
        }
        rows
    }

    /// The refused keys that are shown, most refused first.
    pub fn key_rows(&self) -> Vec<&KeyRow> {
        let shown = |row: &&KeyRow| self.opened.as_ref().is_none_or(|name| *name == row.limit);
        self.keys.iter().filter(shown).collect()
    }

    /// Moves the selection.
    pub fn select(&mut self, by: isize) -> Action {
        let rows = self.limit_rows().len() + self.key_rows().len();
        self.selected = self.selected.saturating_add_signed(by).min(rows.saturating_sub(1));
        Action::Nothing
    }

    /// Opens the selected limit, or confirms what was typed.
    pub fn enter(&mut self) -> Action {
        if let Some(typed) = self.prompt.take() {
            let Some(KeyRow { name: Some(name), .. }) = self.selected_key() else { return Action::Nothing };
            if typed != "yes" {
                self.message = "nothing was changed".to_owned();
                return Action::Nothing;
            }
            let (name, shown) = (name.clone(), self.selected_key().map(KeyRow::shown).unwrap_or_default());
            return Action::Unblock { name, shown };
        }
        let name = self.limit_rows().get(self.selected).map(|row| row.limit.name.clone());
        if let Some(name) = name {
            (self.opened, self.selected) = (Some(name), 0);
        }
        Action::Nothing
    }

    /// Goes back: from the prompt, or from a limit to all limits.
    pub fn back(&mut self) -> Action {
        if self.prompt.take().is_none() {
            (self.opened, self.selected) = (None, 0);
        }
        Action::Nothing
    }

    /// A character was typed.
    pub fn type_char(&mut self, char: char) -> Action {
        if let Some(typed) = &mut self.prompt {
            typed.push(char);
            return Action::Nothing;
        }
        self.message.clear();
        match char {
            'q' => return Action::Quit,
            'r' => self.by_refused = !self.by_refused,
            'p' => self.paused = !self.paused,
            'u' => match self.selected_key() {
                Some(KeyRow { name: Some(_), .. }) => self.prompt = Some(String::new()),
                Some(_) => {
                    self.message = "this key is too long to be named: use `tollkeeper unblock`".to_owned()
                }
                None => self.message = "select a key below the limits first".to_owned(),
            },
            _ => {}
        }
        Action::Nothing
    }

    /// The selected key, if a key is selected.
    pub fn selected_key(&self) -> Option<&KeyRow> {
        self.key_rows().get(self.selected.checked_sub(self.limit_rows().len())?).copied()
    }
}
