//! Tables of commands: on a terminal as wide as it is, otherwise columns separated by tabs.

use std::io::IsTerminal;

use comfy_table::{Attribute, CellAlignment, ColumnConstraint, ContentArrangement, presets};

use crate::cli::output;
use crate::cli::style::{self, Color};
use crate::domain::terminal_text;

/// The width where the terminal does not report one.
const DEFAULT_WIDTH: u16 = 80;

pub struct Table {
    columns: Vec<Column>,
    titles: Vec<String>,
    rows: Vec<Vec<Cell>>,
}

#[derive(Clone, Copy, Debug)]
pub struct Column {
    title: &'static str,
    is_number: bool,
    /// Its text may be broken into several lines.
    is_flexible: bool,
}

impl Column {
    /// Its texts are never broken.
    pub const fn text(title: &'static str) -> Self {
        Self {
            title,
            is_number: false,
            is_flexible: false,
        }
    }

    /// Aligned at the right.
    pub const fn number(title: &'static str) -> Self {
        Self {
            is_number: true,
            ..Self::text(title)
        }
    }

    /// Its texts are broken if the table is wider than the terminal.
    pub const fn flexible(title: &'static str) -> Self {
        Self {
            is_flexible: true,
            ..Self::text(title)
        }
    }
}

#[derive(Clone, Debug, Default)]
pub struct Cell {
    text: String,
    short: Option<String>,
    color: Option<Color>,
}

impl Cell {
    /// A text of any origin; it becomes one line.
    pub fn new(text: impl ToString) -> Self {
        Self {
            text: terminal_text::sanitize_line(&text.to_string()),
            ..Self::default()
        }
    }

    pub fn colored(self, color: impl Into<Option<Color>>) -> Self {
        Self {
            color: color.into(),
            ..self
        }
    }

    /// The text on a terminal that is too narrow for the whole one.
    pub fn or_short(self, short: impl ToString) -> Self {
        Self {
            short: Some(terminal_text::sanitize_line(&short.to_string())),
            ..self
        }
    }
}

impl Table {
    pub fn new(columns: impl IntoIterator<Item = Column>) -> Self {
        let columns: Vec<Column> = columns.into_iter().collect();
        Self {
            titles: columns.iter().map(|it| it.title.to_owned()).collect(),
            columns,
            rows: Vec::new(),
        }
    }

    /// Replaces the title of a column by a text of any origin.
    pub fn rename(&mut self, column: usize, title: &str) {
        self.titles[column] = terminal_text::sanitize_line(title);
    }

    pub fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// Prints it on stdout.
    pub fn print(&self) -> anyhow::Result<()> {
        let text = match is_for_terminal() {
            true => self.for_terminal(output::stdout_width().unwrap_or(DEFAULT_WIDTH)),
            false => self.for_pipe(),
        };
        output::print_safe(&text)
    }

    pub fn for_pipe(&self) -> String {
        let mut text = self.titles.join("\t");
        text.push('\n');
        for row in &self.rows {
            let cells = row.iter().map(|cell| cell.text.as_str());
            text.push_str(&cells.collect::<Vec<_>>().join("\t"));
            text.push('\n');
        }
        text
    }

    pub fn for_terminal(&self, width: u16) -> String {
        let full = self.laid_out(width, |cell| &cell.text);
        let columns = full.column_max_content_widths();
        let gaps = 2 * columns.len().saturating_sub(1);
        let content: usize = columns.iter().map(|column| usize::from(*column)).sum();
        let table = match content + gaps > usize::from(width) {
            true => self.laid_out(width, |cell| cell.short.as_ref().unwrap_or(&cell.text)),
            false => full,
        };
        let lines = table.lines().map(|line| format!("{}\n", line.trim_end()));
        lines.collect()
    }

    fn laid_out<'t>(
        &'t self,
        width: u16,
        text: impl Fn(&'t Cell) -> &'t String,
    ) -> comfy_table::Table {
        let mut table = comfy_table::Table::new();
        table
            .load_style(presets::NOTHING)
            .set_content_arrangement(ContentArrangement::Dynamic)
            .force_no_tty()
            .enforce_styling()
            .set_width(width);
        table.style_text_only();
        let header = |title| comfy_table::Cell::new(title).add_attribute(Attribute::Dim);
        table.set_header(self.titles.iter().map(header));
        for row in &self.rows {
            table.add_row(row.iter().map(|cell| {
                let shown = comfy_table::Cell::new(text(cell));
                match cell.color {
                    None => shown,
                    Some(Color::Dim) => shown.add_attribute(Attribute::Dim),
                    Some(color) => shown.fg(terminal_color(color)),
                }
            }));
        }
        let last = self.columns.len().saturating_sub(1);
        for (index, column) in self.columns.iter().enumerate() {
            let Some(shown) = table.column_mut(index) else {
                continue;
            };
            shown.set_padding((0, if index == last { 0 } else { 2 }));
            if column.is_number {
                shown.set_cell_alignment(CellAlignment::Right);
            }
            if !column.is_flexible {
                shown.set_constraint(ColumnConstraint::ContentWidth);
            }
        }
        table
    }
}

/// Whether tables are laid out for people.
pub fn is_for_terminal() -> bool {
    std::io::stdout().is_terminal() || style::is_forced()
}

fn terminal_color(color: Color) -> comfy_table::Color {
    match color {
        Color::Green => comfy_table::Color::DarkGreen,
        Color::Red => comfy_table::Color::DarkRed,
        Color::Yellow => comfy_table::Color::DarkYellow,
        Color::Cyan => comfy_table::Color::DarkCyan,
        Color::Dim => comfy_table::Color::Reset,
    }
}
