//! `tollkeeper top`: a live table of the limits and the most refused keys of a running server.
//!
//! [`model`] is what is known, [`frame`] draws it as text; this file reads the event stream and the keyboard, and owns
//! the terminal.

pub mod frame;
pub mod model;

use std::io::{self, IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use crossterm::event::{Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use crossterm::{cursor, event, execute, queue, terminal};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::sync::mpsc;

use self::frame::frame;
use self::model::{Action, Model};
use crate::command::args::Top;
use crate::command::client::{Client, query};
use crate::command::limits;
use crate::command::say;

/// How often the list of keys is read.
const KEYS_EVERY: Duration = Duration::from_secs(5);
/// The size of a frame that is printed without a terminal.
const PRINTED: (u16, u16) = (110, 40);
/// The longest time between two attempts to connect.
const LONGEST_PAUSE: u64 = 30;

/// Shows the table until `q` is pressed; prints one frame without a terminal or with `--once`.
pub fn run(args: &Top) -> anyhow::Result<ExitCode> {
    let mut client = Client::new(&args.target)?;
    let live = io::stdout().is_terminal() && io::stdin().is_terminal();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        // First the call that every token setting protects, so that one prompt is enough.
        let events = match client.stream("/v1/events").await {
            Err(error) if live && !client.has_token() && error.to_string().contains("unauthorized") => {
                client.set_token(&read_token()?, "the prompt")?;
                client.stream("/v1/events").await?
            }
            events => events?,
        };
        let mut events = Events { body: events, text: String::new() };
        let mut model = Model::new(client.shown());
        model.set_limits(limits::active(&client.get("/v1/limits").await?)?);
        model.set_history(&client.get("/v1/history?span=5m").await?.read::<model::History>("history")?);
        model.set_keys(client.get("/v1/top").await?.read("top keys")?);
        if args.json {
            return print_json(&client, &mut events, args.once).await;
        }
        if args.once || !live {
            let event = events.next().await?.context("the server closed the event stream")?;
            model.set_event(serde_json::from_str(&event).context("the server sent an invalid event")?);
            say(frame(&model, PRINTED.0, PRINTED.1).trim_end())?;
            return Ok(ExitCode::SUCCESS);
        }
        live_table(&client, model, Some(events)).await
    })
}

/// One line for each event, with the top keys of that moment.
async fn print_json(client: &Client, events: &mut Events, once: bool) -> anyhow::Result<ExitCode> {
    while let Some(event) = events.next().await? {
        let keys = client.get("/v1/top").await?.body;
        say(format_args!("{{\"event\":{event},\"top\":{keys}}}"))?;
        if once {
            return Ok(ExitCode::SUCCESS);
        }
    }
    bail!("the server closed the event stream")
}

async fn live_table(
    client: &Client,
    mut model: Model,
    mut events: Option<Events>,
) -> anyhow::Result<ExitCode> {
    let _screen = Screen::open()?;
    let mut keys = keyboard();
    let mut every = tokio::time::interval(KEYS_EVERY);
    let (mut retry_at, mut failures) = (Instant::now(), 0);
    loop {
        draw(&model)?;
        let reconnect = tokio::time::sleep_until(retry_at.into());
        tokio::select! {
            key = keys.recv() => match key.map(|event| pressed(&mut model, &event)) {
                None | Some(Action::Quit) => return Ok(ExitCode::SUCCESS),
                Some(Action::Unblock { name, shown }) => {
                    let done = client.delete(&format!("/v1/state?{}", query([("ref", &*name)]))).await;
                    model.say(match done.and_then(|answer| answer.read::<model::Done>("a result")) {
                        Ok(model::Done { done: true }) => format!("unblocked {shown}"),
                        Ok(model::Done { done: false }) => format!("there was nothing to forget of {shown}"),
                        Err(error) => format!("{error:#}"),
                    });
                }
                Some(Action::Nothing) => {}
            },
            event = next(&mut events) => match event {
                Ok(Some(event)) => {
                    failures = 0;
                    if let Ok(event) = serde_json::from_str::<model::Event>(&event) {
                        if model.is_stale(&event)
                            && let Ok(answer) = client.get("/v1/limits").await
                        {
                            model.set_limits(limits::active(&answer)?);
                        }
                        model.set_event(event);
                    }
                }
                _ => {
                    events = None;
                    let pause = (1u64 << failures.min(5)).min(LONGEST_PAUSE);
                    (failures, retry_at) = (failures + 1, Instant::now() + Duration::from_secs(pause));
                    model.disconnected();
                }
            },
            () = reconnect, if events.is_none() => match client.stream("/v1/events").await {
                Ok(body) => events = Some(Events { body, text: String::new() }),
                Err(_) => {
                    let pause = (1u64 << failures.min(5)).min(LONGEST_PAUSE);
                    (failures, retry_at) = (failures + 1, Instant::now() + Duration::from_secs(pause));
                }
            },
            _ = every.tick(), if events.is_some() && !model.is_paused() => {
                if let Ok(answer) = client.get("/v1/top").await {
                    model.set_keys(answer.read("top keys")?);
                }
            }
        }
    }
}

fn pressed(model: &mut Model, event: &Event) -> Action {
    let Event::Key(KeyEvent { code, modifiers, kind: KeyEventKind::Press, .. }) = event else {
        return Action::Nothing;
    };
    match code {
        KeyCode::Char('c') if modifiers.contains(KeyModifiers::CONTROL) => Action::Quit,
        KeyCode::Char(char) => model.type_char(*char),
        KeyCode::Up => model.select(-1),
        KeyCode::Down => model.select(1),
        KeyCode::Enter => model.enter(),
        KeyCode::Esc | KeyCode::Backspace => model.back(),
        _ => Action::Nothing,
    }
}

fn draw(model: &Model) -> anyhow::Result<()> {
    let (width, height) = terminal::size()?;
    let mut out = io::stdout().lock();
    queue!(out, cursor::MoveTo(0, 0))?;
    for (row, line) in (0..).zip(frame(model, width, height).lines()) {
        queue!(out, cursor::MoveTo(0, row), terminal::Clear(terminal::ClearType::CurrentLine))?;
        write!(out, "{line}")?;
    }
    queue!(out, terminal::Clear(terminal::ClearType::FromCursorDown))?;
    Ok(out.flush()?)
}

/// The events of the keyboard, read by a thread of their own: reading cannot be cancelled.
fn keyboard() -> mpsc::UnboundedReceiver<Event> {
    let (sender, keys) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            if sender.send(event).is_err() {
                return;
            }
        }
    });
    keys
}

/// Reads a token from the terminal without showing it.
fn read_token() -> anyhow::Result<String> {
    eprint!("token: ");
    io::stderr().flush()?;
    let _raw = Raw::enter()?;
    let mut token = String::new();
    loop {
        let Event::Key(KeyEvent { code, modifiers, kind: KeyEventKind::Press, .. }) = event::read()? else {
            continue;
        };
        match code {
            KeyCode::Enter => break,
            KeyCode::Char('c') if modifiers.contains(KeyModifiers::CONTROL) => bail!("no token was given"),
            KeyCode::Char(char) => token.push(char),
            KeyCode::Backspace => drop(token.pop()),
            _ => {}
        }
    }
    eprint!("\r\n");
    Ok(token)
}

/// The alternate screen. Dropping it, also in a panic, leaves the terminal as it was.
struct Screen(Raw);

impl Screen {
    fn open() -> anyhow::Result<Screen> {
        let raw = Raw::enter()?;
        execute!(io::stdout(), terminal::EnterAlternateScreen, cursor::Hide)?;
        Ok(Screen(raw))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = execute!(io::stdout(), cursor::Show, terminal::LeaveAlternateScreen);
    }
}

/// Raw mode: keys arrive one by one and are not shown.
struct Raw;

impl Raw {
    fn enter() -> anyhow::Result<Raw> {
        terminal::enable_raw_mode()?;
        Ok(Raw)
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _ = terminal::disable_raw_mode();
    }
}

/// The data of server-sent events.
struct Events {
    body: Incoming,
    /// What has arrived of the next event.
    text: String,
}

impl Events {
    /// The next event; `None` at the end of the stream. Cancel safe.
    async fn next(&mut self) -> anyhow::Result<Option<String>> {
        loop {
            if let Some(end) = self.text.find("\n\n") {
                let event: String = self.text.drain(..end + 2).collect();
                if let Some(data) = event.trim_end().strip_prefix("data: ") {
                    return Ok(Some(data.to_owned()));
                }
            }
            let Some(part) = self.body.frame().await else { return Ok(None) };
            if let Ok(bytes) = part?.into_data() {
                self.text.push_str(&String::from_utf8_lossy(&bytes));
            }
        }
    }
}

/// As [`Events::next`]; never without a connection.
async fn next(events: &mut Option<Events>) -> anyhow::Result<Option<String>> {
    match events {
        Some(events) => events.next().await,
        None => std::future::pending().await,
    }
}
