//! Tables of commands: on a terminal as wide as it is, or a row after the other if it is too narrow; otherwise columns separated by
//! tabs.

use std::io::IsTerminal;

use comfy_table::{Attribute, CellAlignment, ColumnConstraint, ContentArrangement, Width, presets};

use crate::cli::output;
use crate::cli::style::{self, Color};
use crate::domain::run::RunId;
use crate::domain::run_ref::ShortIds;
use crate::domain::terminal_text;

/// The width where the terminal does not report one.
const DEFAULT_WIDTH: u16 = 80;
/// The space between two columns.
const GAP: u16 = 2;
/// The least width of a column whose texts are broken: with less, nobody can read them.
const MIN_FLEXIBLE_WIDTH: u16 = 8;

pub struct Table {
    columns: Vec<Column>,
    titles: Vec<String>,
    rows: Vec<Vec<Cell>>,
    /// Whether the rows belong together, such as those of a tree: they stay a table if the terminal is too narrow.
    keeps_rows: bool,
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
    /// The run whose id it is, if a terminal shows only the end of it.
    run: Option<RunId>,
    color: Option<Color>,
}

impl Cell {
    /// The id of a run. On a terminal, as many of its last digits as it needs to differ from the others of the table.
    pub fn run(id: RunId) -> Self {
        Self {
            run: Some(id),
            ..Self::new(id)
        }
    }

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
            keeps_rows: false,
        }
    }

    /// It stays a table if the terminal is too narrow.
    pub fn keep_rows(self) -> Self {
        Self {
            keeps_rows: true,
            ..self
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
        let runs = self.rows.iter().flatten().filter_map(|cell| cell.run);
        let short_ids = ShortIds::new(runs);
        let whole = |cell: &Cell| match cell.run {
            Some(run) => short_ids.short(run),
            None => cell.text.clone(),
        };
        let full = self.laid_out(width, whole);
        if self.width_of(&full, |_, content| content) <= width {
            return lines(&full);
        }
        let mut short = self.laid_out(width, |cell| {
            cell.short.clone().unwrap_or_else(|| whole(cell))
        });
        if self.width_of(&short, |_, content| content) <= width {
            return lines(&short);
        }
        let min_width = self.width_of(&short, |column, content| match column.is_flexible {
            true => content.min(MIN_FLEXIBLE_WIDTH),
            false => content,
        });
        if min_width > width && !self.keeps_rows && !self.rows.is_empty() {
            return self.records(whole);
        }
        self.allow_breaks(&mut short);
        lines(&short)
    }

    /// The width of the whole table, if that of each column is `width` of its content's.
    fn width_of(&self, table: &comfy_table::Table, width: impl Fn(&Column, u16) -> u16) -> u16 {
        let contents = table.column_max_content_widths();
        let columns = self.columns.iter().zip(contents);
        let widths = columns.map(|(column, content)| width(column, content).saturating_add(GAP));
        let sum = widths.fold(0, u16::saturating_add);
        sum.saturating_sub(GAP)
    }

    /// A line for each value, and an empty one between two rows.
    fn records(&self, text: impl Fn(&Cell) -> String) -> String {
        let title_width = self.titles.iter().map(|title| title.chars().count()).max();
        let title_width = title_width.unwrap_or_default();
        let records = self.rows.iter().map(|row| {
            let values = self.titles.iter().zip(row);
            let values = values.filter(|(_, cell)| !cell.text.is_empty());
            let lines =
                values.map(|(title, cell)| format!("{title:title_width$}  {}\n", text(cell)));
            lines.collect::<String>()
        });
        records.collect::<Vec<_>>().join("\n")
    }

    /// Has the texts of flexible columns broken where there is too little space.
    fn allow_breaks(&self, table: &mut comfy_table::Table) {
        let contents = table.column_max_content_widths();
        for (index, column) in self.columns.iter().enumerate() {
            if let Some(shown) = table.column_mut(index).filter(|_| column.is_flexible) {
                // With its padding, which the last column does not have.
                let least = contents[index].min(MIN_FLEXIBLE_WIDTH) + shown.padding_width();
                shown.set_constraint(ColumnConstraint::LowerBoundary(Width::Fixed(least)));
            }
        }
    }

    /// A table in which no text is broken.
    fn laid_out(&self, width: u16, text: impl Fn(&Cell) -> String) -> comfy_table::Table {
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
            let padding = if index == last { 0 } else { GAP };
            shown.set_padding((0, padding));
            if column.is_number {
                shown.set_cell_alignment(CellAlignment::Right);
            }
            shown.set_constraint(ColumnConstraint::ContentWidth);
        }
        table
    }
}

fn lines(table: &comfy_table::Table) -> String {
    let lines = table.lines().map(|line| format!("{}\n", line.trim_end()));
    lines.collect()
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

#[cfg(test)]
mod tests {
    use super::{Cell, Column, Table};

    fn table() -> Table {
        let columns = ["id", "agent", "error"];
        let mut table = Table::new([
            Column::text(columns[0]),
            Column::flexible(columns[1]),
            Column::flexible(columns[2]),
        ]);
        let cells = ["run_0123456789", "researcher", "no such file or directory"];
        table.row(cells.map(Cell::new));
        table.row(["run_9876543210", "solo", ""].map(Cell::new));
        table
    }

    #[test]
    fn a_narrow_terminal_breaks_texts_and_a_narrower_one_shows_one_row_after_the_other() {
        let widest = |text: &str| text.lines().map(str::len).max();
        let shown = |table: Table, width| {
            let text = table.for_terminal(width);
            anstream::adapter::strip_str(&text).to_string()
        };
        let broken = shown(table(), 40);
        assert!(broken.starts_with("id "), "{broken}");
        assert!(widest(&broken) <= Some(40), "{broken}");
        let records = shown(table(), 33);
        assert_eq!(
            records,
            "id     run_0123456789\nagent  researcher\nerror  no such file or directory\n\n\
             id     run_9876543210\nagent  solo\n"
        );
        // No text is broken where all fit.
        let width = "run_0123456789  researcher  no such file or directory".len() as u16;
        assert_eq!(shown(table(), width).lines().count(), 3);
        let kept = shown(table().keep_rows(), 33);
        assert!(kept.starts_with("id "), "{kept}");
    }

    #[test]
    fn a_terminal_shows_the_ends_of_ids_that_differ() {
        let mut table = Table::new([Column::text("run")]);
        for end in ["7000-8000-00000000000a", "7000-8000-00010000000a"] {
            let id = format!("run_01980000-0000-{end}");
            table.row([Cell::run(id.parse().expect("an id"))]);
        }
        let shown = anstream::adapter::strip_str(&table.for_terminal(80)).to_string();
        assert_eq!(shown, "run\n00000000a\n10000000a\n");
        assert!(
            table
                .for_pipe()
                .contains("\nrun_01980000-0000-7000-8000-00000000000a\n")
        );
    }
}
