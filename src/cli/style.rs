//! Colours on a terminal, and text made of coloured parts. `--color`, `NO_COLOR` and `TERM` decide whether there are any.

use std::ffi::OsString;
use std::fmt;

use anstream::ColorChoice;
use clap::ValueEnum;

use crate::domain::run::Status;
use crate::domain::terminal_text;

/// When to print colours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum When {
    /// On a terminal, unless NO_COLOR is set
    #[default]
    Auto,
    Always,
    Never,
}

impl When {
    /// The value of `--color` in arguments that are not parsed: those of a request for help.
    pub fn of_arguments(arguments: impl IntoIterator<Item = OsString>) -> Self {
        let mut arguments = arguments
            .into_iter()
            .map(|argument| argument.to_string_lossy().into_owned())
            .take_while(|argument| argument != "--");
        while let Some(argument) = arguments.next() {
            let value = match argument.strip_prefix("--color") {
                Some("") => arguments.next(),
                Some(rest) => rest.strip_prefix('=').map(str::to_owned),
                None => None,
            };
            let when = value.and_then(|value| Self::from_str(&value, false).ok());
            if let Some(when) = when {
                return when;
            }
        }
        Self::default()
    }

    /// Decides for all output of this process.
    pub fn apply(self) {
        let choice = match self {
            Self::Auto => ColorChoice::Auto,
            Self::Always => ColorChoice::Always,
            Self::Never => ColorChoice::Never,
        };
        choice.write_global();
    }
}

/// Whether the user wants colours wherever the output goes.
pub fn is_forced() -> bool {
    ColorChoice::global() == ColorChoice::Always
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Color {
    Green,
    Red,
    Yellow,
    Cyan,
    Dim,
}

impl Color {
    /// The parameter of the terminal's sequence for it (ECMA-48, SGR).
    fn code(self) -> u8 {
        match self {
            Self::Green => 32,
            Self::Red => 31,
            Self::Yellow => 33,
            Self::Cyan => 36,
            Self::Dim => 2,
        }
    }
}

/// `None` for the usual colour.
pub fn status_color(status: Status) -> Option<Color> {
    match status {
        Status::Completed => Some(Color::Green),
        Status::Failed => Some(Color::Red),
        Status::Running => Some(Color::Cyan),
        Status::Waiting | Status::Cancelling => Some(Color::Yellow),
        Status::Queued | Status::Cancelled => Some(Color::Dim),
    }
}

/// Text with colours, safe for a terminal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Styled(String);

impl Styled {
    /// Adds a text of any origin, which may have several lines.
    pub fn plain(mut self, text: impl fmt::Display) -> Self {
        let text = terminal_text::sanitize_lines(&text.to_string());
        self.0.push_str(&text);
        self
    }

    /// As [`Styled::plain`], in a colour.
    pub fn colored(mut self, color: impl Into<Option<Color>>, text: impl fmt::Display) -> Self {
        let Some(color) = color.into() else {
            return self.plain(text);
        };
        self.0.push_str(&format!("\x1b[{}m", color.code()));
        self = self.plain(text);
        self.0.push_str("\x1b[0m");
        self
    }

    pub fn append(mut self, other: Self) -> Self {
        self.0.push_str(&other.0);
        self
    }

    /// With the sequences of its colours.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::When;

    #[test]
    fn help_has_the_colours_of_its_arguments() {
        for (arguments, expected) in [
            ("--color never --help", When::Never),
            ("runs --help --color=always", When::Always),
            ("--help --color", When::Auto),
            ("--color=odd --colors=never", When::Auto),
            ("-- --color=never", When::Auto),
        ] {
            let words = arguments.split(' ').map(std::ffi::OsString::from);
            assert_eq!(When::of_arguments(words), expected, "{arguments}");
        }
    }
}
