//! Draws a frame of `top` as text.

use super::model::{KeyRow, LimitRow, Model, SPARKS};

/// The table as text: at most `height` lines of at most `width` characters.
pub fn frame(model: &Model, width: u16, height: u16) -> String {
    let (width, height) = (usize::from(width.max(20)), usize::from(height.max(6)));
    let mut lines = head(model);
    let (limits, keys) = (model.limit_rows(), model.key_rows());
    // Two headings, an empty line and the last line; the keys get a third of the rest, and what limits do not need.
    let room = height.saturating_sub(lines.len() + 4);
    let limits_shown = limits.len().min(room.saturating_sub(keys.len().min(room / 3)));
    let keys_shown = keys.len().min(room - limits_shown);
    // Scrolls so that the selected row is visible.
    let first_limit =
        model.selected.min(limits.len().saturating_sub(1)).saturating_sub(limits_shown.saturating_sub(1));
    let first_key = model.selected.saturating_sub(limits.len()).saturating_sub(keys_shown.saturating_sub(1));
    let columns = Columns::of(&limits, width);
    let is_narrow = width < 60;
    lines.push(columns.heading());
    for (index, row) in limits.iter().enumerate().skip(first_limit).take(limits_shown) {
        lines.push(columns.row(row, index == model.selected));
    }
    if limits_shown < limits.len() {
        let heading = lines.len() - limits_shown - 1;
        lines[heading] = format!("{} ({limits_shown} of {})", lines[heading].trim_end(), limits.len());
    }
    lines.push(String::new());
    lines.push(match keys.is_empty() {
        true => "  no key was refused in the last minutes".to_owned(),
        false if is_narrow => format!("  {:<10} {:<9} MOST REFUSED KEYS", "LIMIT", "REFUSED"),
        false => format!("  {:<18} {:<22} MOST REFUSED KEYS, last 5 to 10 minutes", "LIMIT", "REFUSED"),
    });
    for (index, row) in keys.iter().enumerate().skip(first_key).take(keys_shown) {
        lines.push(key_row(row, index + limits.len() == model.selected, is_narrow));
    }
    lines.truncate(height - 1);
    lines.resize(height - 1, String::new());
    lines.push(last_line(model));
    let lines: Vec<String> = lines.iter().map(|line| cut(line, width)).collect();
    lines.join("\n")
}

/// What concerns all limits.
fn head(model: &Model) -> Vec<String> {
    let Some(event) = &model.event else {
        return vec![format!("tollkeeper top  {}  waiting for the first event", model.server)];
    };
    let [asked, refused] = model.requests();
    let share = if asked > 0.0 { refused / asked * 100.0 } else { 0.0 };
    let mut lines = vec![
        format!(
            "tollkeeper top  {}  {} UTC  limits version {} ({})",
            model.server,
            clock(event.t),
            event.version,
            event.source
        ),
        format!(
            "{} requests/s  {share:.1} % refused  {} degraded  store {}{}  {} keys of {}",
            rate(asked),
            event.requests.degraded,
            event.store.state,
            event.store.p99_ms.map_or(String::new(), |millis| format!(" p99 {millis} ms")),
            event.keys,
            event.max_keys
        ),
    ];
    if let Some(error) = &event.error {
        lines.push(format!("the file was not loaded: {}", error.lines().next().unwrap_or_default()));
    } else if event.shadowed {
        lines.push("the limits in the file differ from the active ones".to_owned());
    }
    if let Some(since) = model.since {
        let seconds = since.elapsed().as_secs();
        lines.push(format!("no connection for {seconds} s; numbers are of {} UTC", clock(event.t)));
    }
    lines.push(String::new());
    lines
}

/// The columns of the limits that fit.
struct Columns {
    name: usize,
    quota: usize,
    mode: bool,
    starved: bool,
    sparks: usize,
}

impl Columns {
    fn of(rows: &[LimitRow<'_>], width: usize) -> Columns {
        let longest = |text: &dyn Fn(&LimitRow<'_>) -> usize| rows.iter().map(text).max().unwrap_or(0);
        // Marker, name, asked, refused and share always; then what there is room for.
        let room = width.saturating_sub(2 + 1 + 9 + 1 + 9 + 1 + 7);
        let name =
            longest(&|row| row.limit.name.chars().count()).clamp(5, 28).min(width / 3).min(room.max(5));
        let quota = longest(&|row| row.limit.quota().chars().count()).clamp(5, 22);
        let mut left = room.saturating_sub(name);
        let mut fits = |needed: usize| {
            let fits = needed <= left;
            left -= if fits { needed } else { 0 };
            fits
        };
        let quota = if fits(quota + 1) { quota } else { 0 };
        let (mode, starved) = (fits(8), fits(8));
        Columns { name, quota, mode, starved, sparks: left.saturating_sub(1).min(SPARKS) }
    }

    fn heading(&self) -> String {
        let mut line = format!("  {:<1$}", "LIMIT", self.name);
        if self.quota > 0 {
            line += &format!(" {:<1$}", "QUOTA", self.quota);
        }
        if self.mode {
            line += " MODE   ";
        }
        line += &format!(" {:>9} {:>9} {:>7}", "ASKED/S", "REFUSED/S", "REFUSED");
        if self.starved {
            line += " STARVED";
        }
        if self.sparks >= 10 {
            line += &format!(" REFUSED, LAST {} S", self.sparks);
        }
        line
    }

    fn row(&self, row: &LimitRow<'_>, selected: bool) -> String {
        let [asked, refused] = row.rates.per_second();
        let share = if asked > 0.0 { format!("{:.1} %", refused / asked * 100.0) } else { "-".to_owned() };
        let mut line = format!("{} {:<2$}", marker(selected), cut(&row.limit.name, self.name), self.name);
        if self.quota > 0 {
            line += &format!(" {:<1$}", cut(&row.limit.quota(), self.quota), self.quota);
        }
        if self.mode {
            line += &format!(" {:<7}", row.limit.mode);
        }
        line += &format!(" {:>9} {:>9} {share:>7}", rate(asked), rate(refused));
        if self.starved {
            line += &format!(" {:>7}", row.starved);
        }
        if self.sparks >= 10 {
            let refused: Vec<u64> = row.rates.refused().collect();
            let last = &refused[refused.len().saturating_sub(self.sparks)..];
            line += &format!(" {}", sparkline(last));
        }
        line
    }
}

fn key_row(row: &KeyRow, selected: bool, is_narrow: bool) -> String {
    let count = match row.error {
        0 => row.count.to_string(),
        error if is_narrow => format!("{} to {}", row.count, row.count + error),
        error => format!("{}, at most {error} more", row.count),
    };
    let (marker, key) = (marker(selected), row.shown());
    match is_narrow {
        true => format!("{marker} {:<10} {count:<9} {key}", cut(&row.limit, 10)),
        false => format!("{marker} {:<18} {count:<22} {key}", cut(&row.limit, 18)),
    }
}

fn marker(selected: bool) -> char {
    if selected { '>' } else { ' ' }
}

fn last_line(model: &Model) -> String {
    match (&model.prompt, &model.selected_key()) {
        (Some(typed), Some(key)) => {
            format!("unblock {} under `{}`? type yes: {typed}", key.shown(), key.limit)
        }
        _ if !model.message.is_empty() => model.message.clone(),
        _ => {
            let sort = if model.is_by_refused() { "by file" } else { "by refused" };
            let pause = if model.is_paused() { "continue" } else { "pause" };
            let back = if model.opened.is_some() { "Esc all limits" } else { "Enter limit" };
            format!("q quit  ↑↓ select  {back}  r sort {sort}  p {pause}  u unblock")
        }
    }
}

/// A count per second: 0, 0.4, 12, 1.2k.
fn rate(rate: f64) -> String {
    match rate {
        0.0 => "0".to_owned(),
        ..10.0 => format!("{rate:.1}"),
        ..10_000.0 => format!("{rate:.0}"),
        ..10_000_000.0 => format!("{:.1}k", rate / 1e3),
        _ => format!("{:.1}M", rate / 1e6),
    }
}

/// Bars of these heights, relative to the highest.
fn sparkline(counts: &[u64]) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let most = counts.iter().copied().max().unwrap_or(0).max(1);
    let bar = |count: &u64| match count {
        0 => ' ',
        count => BARS[usize::try_from((count * 7).div_ceil(most)).unwrap_or(7).min(7)],
    };
    counts.iter().map(bar).collect()
}

/// The time of day in UTC.
fn clock(unix: u64) -> String {
    format!("{:02}:{:02}:{:02}", unix / 3_600 % 24, unix / 60 % 60, unix % 60)
}

/// The text, cut in the middle to this many characters.
fn cut(text: &str, width: usize) -> String {
    let len = text.chars().count();
    if len <= width {
        return text.to_owned();
    }
    let tail = (width - 1) / 3;
    let head: String = text.chars().take(width - 1 - tail).collect();
    let end: String = text.chars().skip(len - tail).collect();
    format!("{head}…{end}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::command::top::model::Action;

    /// Two limits with ten seconds of traffic, and two refused keys.
    fn model() -> Model {
        let mut model = Model::new("http://127.0.0.1:8080");
        let limit = |name: &str, mode: &str| json!({ "name": name, "by": ["user"], "rate": "100/min", "burst": 20, "algorithm": "token-bucket", "mode": mode });
        let limits = json!([limit("per-user", "enforce"), limit("new-search-limit", "shadow")]);
        model.set_limits(serde_json::from_value(limits).unwrap());
        for second in 0..11u64 {
            let event = json!({
                "t": 1_760_000_000 + second, "version": 7, "source": "file", "shadowed": false, "error": null,
                "requests": { "allowed": 30 * second, "refused": 10 * second, "degraded": 0 },
                "limits": {
                    "per-user": { "allowed": 30 * second, "refused": 10 * second, "would_refuse": 0, "starved": 2 },
                    "new-search-limit":
                        { "allowed": 39 * second, "refused": 0, "would_refuse": second, "starved": 0 },
                },
                "store": { "state": "ok", "p99_ms": 0.5 }, "keys": 12, "max_keys": 1_000_000,
            });
            model.set_event(serde_json::from_value(event).unwrap());
        }
        let key = |limit: &str, key: &str, count: u64, error: u64| json!({ "limit": limit, "key": [key], "count": count, "error": error, "ref": format!("ref of {key}") });
        let keys =
            json!({ "refused": [key("per-user", "alice", 70, 0), key("new-search-limit", "bob\n", 9, 3)] });
        model.set_keys(serde_json::from_value(keys).unwrap());
        model
    }

    #[test]
    fn frame_of_80_columns() {
        let expected = "\
tollkeeper top  http://127.0.0.1:8080  08:53:30 UTC  limits version 7 (file)
40 requests/s  25.0 % refused  0 degraded  store ok p99 0.5 ms  12 keys of 1000000

  LIMIT            QUOTA            MODE      ASKED/S REFUSED/S REFUSED STARVED
> per-user         100/min burst 20 enforce        40        10  25.0 %       2
  new-search-limit 100/min burst 20 shadow         40       1.0   2.5 %       0

  LIMIT              REFUSED                MOST REFUSED KEYS, last 5 to 10 minutes
  per-user           70                     alice
  new-search-limit   9, at most 3 more      bob\\n";
        let drawn = frame(&model(), 80, 24);
        let lines: Vec<&str> = drawn.lines().collect();
        let expected: Vec<String> = expected.lines().map(|line| cut(line, 80)).collect();
        assert_eq!(lines[..10], expected, "{drawn}");
        assert_eq!(lines.len(), 24);
        assert_eq!(lines[23], "q quit  ↑↓ select  Enter limit  r sort by refused  p pause  u unblock");
    }

    #[test]
    fn frame_fits_any_terminal() {
        for (width, height) in [(80, 24), (40, 10), (200, 50), (20, 6), (1, 1)] {
            let drawn = frame(&model(), width, height);
            let (width, height) = (usize::from(width).max(20), usize::from(height).max(6));
            assert_eq!(drawn.lines().count(), height, "{drawn}");
            assert!(drawn.lines().all(|line| line.chars().count() <= width), "{drawn}");
        }
    }

    #[test]
    fn frame_of_40_columns() {
        let expected = "\
tollkeeper top  http://127…sion 7 (file)
40 requests/s  25.0 % refu…ys of 1000000

  LIMIT        ASKED/S REFUSED/S REFUSED
> per-user          40        10  25.0 %
  new-se…mit        40       1.0   2.5 %

  LIMIT      REFUSED   MOST REFUSED KEYS
  per-user   70        alice
q quit  ↑↓ select  Enter l…se  u unblock";
        assert_eq!(frame(&model(), 40, 10), expected);
    }

    #[test]
    fn frame_of_200_columns() {
        let expected = "\
tollkeeper top  http://127.0.0.1:8080  08:53:30 UTC  limits version 7 (file)
40 requests/s  25.0 % refused  0 degraded  store ok p99 0.5 ms  12 keys of 1000000

  LIMIT            QUOTA            MODE      ASKED/S REFUSED/S REFUSED STARVED REFUSED, LAST 60 S
> per-user         100/min burst 20 enforce        40        10  25.0 %       2 ██████████
  new-search-limit 100/min burst 20 shadow         40       1.0   2.5 %       0 ██████████

  LIMIT              REFUSED                MOST REFUSED KEYS, last 5 to 10 minutes
  per-user           70                     alice
  new-search-limit   9, at most 3 more      bob\\n";
        let drawn = frame(&model(), 200, 50);
        let lines: Vec<&str> = drawn.lines().collect();
        assert_eq!(lines[..10].join("\n"), expected, "{drawn}");
        assert!(lines[10..49].iter().all(|line| line.is_empty()), "{drawn}");
        assert_eq!(lines[49], "q quit  ↑↓ select  Enter limit  r sort by refused  p pause  u unblock");
    }

    #[test]
    fn selected_row_stays_visible_in_a_small_terminal() {
        let mut model = model();
        let keys: Vec<_> = (0..50)
            .map(|n| json!({ "limit": "per-user", "key": [format!("user-{n}")], "count": 9, "error": 0, "ref": "r" }))
            .collect();
        model.set_keys(serde_json::from_value(json!({ "refused": keys })).unwrap());
        for row in 0..52 {
            let drawn = frame(&model, 40, 10);
            assert_eq!(drawn.lines().filter(|line| line.starts_with('>')).count(), 1, "{row}\n{drawn}");
            model.select(1);
        }
        assert_eq!(model.selected, 51);
    }

    #[test]
    fn unblock_needs_a_typed_yes() {
        let mut model = model();
        assert_eq!(model.type_char('u'), Action::Nothing);
        assert!(frame(&model, 80, 24).ends_with("select a key below the limits first"));
        model.select(2);
        model.type_char('u');
        "no".chars().for_each(|char| drop(model.type_char(char)));
        assert!(frame(&model, 80, 24).ends_with("unblock alice under `per-user`? type yes: no"));
        assert_eq!(model.enter(), Action::Nothing);
        model.type_char('u');
        "yes".chars().for_each(|char| drop(model.type_char(char)));
        let unblock = Action::Unblock { name: "ref of alice".to_owned(), shown: "alice".to_owned() };
        assert_eq!(model.enter(), unblock);
        assert_eq!(model.type_char('q'), Action::Quit);
    }

    #[test]
    fn limit_is_opened_sorted_and_paused() {
        let mut model = model();
        model.select(1);
        model.enter();
        let drawn = frame(&model, 80, 24);
        assert!(drawn.contains("new-search-limit") && !drawn.contains("alice"), "{drawn}");
        model.back();
        assert!(frame(&model, 80, 24).contains("alice"));
        model.type_char('r');
        assert_eq!(model.limit_rows()[0].limit.name, "per-user");
        model.type_char('p');
        let before = frame(&model, 80, 24);
        model.set_event(Default::default());
        assert_eq!(frame(&model, 80, 24), before, "nothing moves while it is paused");
    }

    #[test]
    fn restarted_server_restarts_the_rates() {
        let mut model = model();
        let mut event = model.event.clone().unwrap();
        event.requests = super::super::model::Requests { allowed: 4, refused: 0, degraded: 0 };
        event.limits.clear();
        model.set_event(event);
        let [asked, _] = model.requests();
        assert!((asked - 36.4).abs() < 0.01, "9 seconds of 40 and one of 4: {asked}");
    }
}
