//! Tables on standard output: with borders and colours on a terminal, plain columns otherwise.

use std::io::{self, IsTerminal as _};

use comfy_table::{Cell, Color, ContentArrangement, Table, presets};

/// A table with these columns.
pub fn with(columns: &[&str]) -> Table {
    let mut table = Table::new();
    if for_people() {
        table.load_style(presets::UTF8_BORDERS_ONLY).set_content_arrangement(ContentArrangement::Dynamic);
    } else {
        table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    }
    table.set_header(columns.iter().copied());
    table
}

/// A cell in green (`Some(true)`), red (`Some(false)`) or without colour.
pub fn cell(text: impl ToString, good: Option<bool>) -> Cell {
    let cell = Cell::new(text);
    match good {
        Some(true) if for_people() => cell.fg(Color::Green),
        Some(false) if for_people() => cell.fg(Color::Red),
        _ => cell,
    }
}

/// Whether standard output is a terminal and `NO_COLOR` is not set.
pub fn for_people() -> bool {
    io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}
