//! A run as people name it: by its id, or by a beginning or an end of it that no other id has. The beginning of an id is a
//! time, so displays show the end.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use uuid::Uuid;

use crate::domain::run::RunId;
use crate::settings::suggestion;

/// Digits of an id.
const DIGITS: usize = 32;
/// The fewest digits that name a run. A number that a program sends by mistake is shorter.
const MIN_DIGITS: usize = 4;
/// Digits of an id in displays, at least.
const SHORT_DIGITS: usize = 8;
/// The fewest mistyped digits that still resemble an id: from its beginning, whose first ones are the time in milliseconds, and
/// to its end.
const MIN_SIMILAR_BEGINNING: usize = 16;
const MIN_SIMILAR_END: usize = 6;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunRef {
    Id(RunId),
    Part(IdPart),
}

/// Consecutive digits of an id, from its beginning or to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdPart {
    /// In lower case, without dashes.
    digits: String,
    /// Whether `run_` is before them.
    is_beginning: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a run id is run_ and a UUID; its first or last digits, at least {MIN_DIGITS}, name a run, too"
)]
pub struct InvalidRunRef;

impl FromStr for RunRef {
    type Err = InvalidRunRef;

    /// `run_` and the dashes may be left out.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.to_ascii_lowercase();
        let after_prefix = text.strip_prefix("run_");
        let digits = after_prefix.unwrap_or(&text).replace('-', "");
        if !digits.chars().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(InvalidRunRef);
        }
        match digits.len() {
            DIGITS => Ok(Self::Id(RunId(from_digits(&digits)))),
            MIN_DIGITS..DIGITS => Ok(Self::Part(IdPart {
                digits,
                is_beginning: after_prefix.is_some(),
            })),
            _ => Err(InvalidRunRef),
        }
    }
}

impl fmt::Display for RunRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Id(id) => id.fmt(f),
            Self::Part(part) => part.fmt(f),
        }
    }
}

impl JsonSchema for RunRef {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "RunRef".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "pattern": "^(run_)?[0-9A-Fa-f-]{4,36}$"})
    }
}

impl IdPart {
    /// The first and the last id that begin so.
    pub fn range(&self) -> (RunId, RunId) {
        let first = from_digits(&format!("{:0<DIGITS$}", self.digits));
        let last = from_digits(&format!("{:f<DIGITS$}", self.digits));
        (RunId(first), RunId(last))
    }

    /// The digits that an id may end with; `None` if they can only be its beginning.
    pub fn end(&self) -> Option<&str> {
        (!self.is_beginning).then_some(&self.digits)
    }
}

impl fmt::Display for IdPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let prefix = if self.is_beginning { "run_" } else { "" };
        write!(f, "{prefix}{}", self.digits)
    }
}

/// The run of `known` that was probably meant by one that does not exist.
pub fn similar_run(run: &RunRef, known: impl IntoIterator<Item = RunId>) -> Option<RunId> {
    let typed = match run {
        RunRef::Id(id) => digits(*id),
        RunRef::Part(part) => part.digits.clone(),
    };
    let is_long = |min| typed.len() >= min;
    let mut candidates = Vec::new();
    for id in known {
        let digits = digits(id);
        // The beginnings of all ids of a time are similar.
        if is_long(MIN_SIMILAR_BEGINNING) {
            candidates.push((digits[..typed.len()].to_owned(), id));
        }
        if is_long(MIN_SIMILAR_END) {
            candidates.push((digits[DIGITS - typed.len()..].to_owned(), id));
        }
    }
    let texts = candidates.iter().map(|(text, _)| text.as_str());
    let closest = suggestion::closest(&typed, texts)?.to_owned();
    let mut candidates = candidates.into_iter();
    candidates
        .find(|(text, _)| *text == closest)
        .map(|(_, id)| id)
}

/// The end of an id, as displays show it. [`ShortIds`] are for lists, whose ids have to differ.
pub fn short_id(id: RunId) -> String {
    ShortIds(SHORT_DIGITS).short(id)
}

/// Shortens ids so far that each of a set still differs from the others.
pub struct ShortIds(usize);

impl ShortIds {
    pub fn new(ids: impl IntoIterator<Item = RunId>) -> Self {
        let backwards = |id| digits(id).chars().rev().collect();
        let mut ids: Vec<String> = ids.into_iter().map(backwards).collect();
        ids.sort_unstable();
        ids.dedup();
        let pairs = ids.windows(2).map(|pair| {
            let same = pair[0].chars().zip(pair[1].chars());
            same.take_while(|(one, other)| one == other).count() + 1
        });
        Self(pairs.max().unwrap_or(0).max(SHORT_DIGITS))
    }

    /// The last digits of the id.
    pub fn short(&self, id: RunId) -> String {
        digits(id).split_off(DIGITS - self.0)
    }
}

fn digits(id: RunId) -> String {
    id.0.as_simple().to_string()
}

/// As many digits as an id has.
fn from_digits(digits: &str) -> Uuid {
    u128::from_str_radix(digits, 16).map_or(Uuid::nil(), Uuid::from_u128)
}

#[cfg(test)]
mod tests {
    use super::{RunRef, ShortIds, short_id, similar_run};

    #[test]
    fn a_part_is_hexadecimal_with_or_without_dashes() {
        let parsed = |text: &str| text.parse::<RunRef>().map(|it| it.to_string()).ok();
        let whole = "run_01890a5d-ac96-774b-bcce-b302099a8057";
        for (text, shown) in [
            ("run_01890A5d", "run_01890a5d"),
            ("01890a5dac967", "01890a5dac967"),
            ("ac96-774B", "ac96774b"),
            (whole, whole),
            ("01890a5dac96774bbcceb302099a8057", whole),
        ] {
            assert_eq!(parsed(text).as_deref(), Some(shown), "{text}");
        }
        for text in ["", "run_", "..", "-", "xyza", "12", &format!("{whole}0")] {
            assert_eq!(parsed(text), None, "{text}");
        }
    }

    #[test]
    fn a_part_is_a_beginning_or_without_the_prefix_also_an_end() {
        let part = |text: &str| match text.parse() {
            Ok(RunRef::Part(part)) => part,
            other => panic!("{other:?}"),
        };
        let (first, last) = part("01890a5d-ac").range();
        assert_eq!(
            first.to_string(),
            "run_01890a5d-ac00-0000-0000-000000000000"
        );
        assert_eq!(last.to_string(), "run_01890a5d-acff-ffff-ffff-ffffffffffff");
        assert_eq!(part("01890a5d-ac").end(), Some("01890a5dac"));
        assert_eq!(part("run_0189").end(), None);
    }

    #[test]
    fn a_mistyped_id_resembles_the_one_that_was_meant() {
        let id = |text: &str| text.parse().expect("an id");
        let meant = id("run_01890a5d-ac96-774b-bcce-b302099a8057");
        let known = [meant, id("run_01890a5d-ac96-774c-8f13-77d10be25a9c")];
        for (typed, found) in [
            ("run_01890a5d-ac96-774b-bcce-b302099a8075", Some(meant)),
            ("01890a5dac96774bbcde", Some(meant)),
            ("099b8057", Some(meant)),
            ("8058", None),
            ("01890a5e", None),
            ("run_22222222-2222-7222-8222-222222222222", None),
        ] {
            let typed = typed.parse().expect("a reference");
            assert_eq!(similar_run(&typed, known), found, "{typed}");
        }
    }

    #[test]
    fn short_ids_differ() {
        let ids = [
            "0000-7000-8000-00000000000a",
            "0000-7000-8001-00000000000a",
            "0000-7000-8001-00000000000a",
        ];
        let ids = ids.map(|end| format!("run_01980000-{end}").parse().expect("an id"));
        let short = ShortIds::new(ids);
        assert_eq!(short.short(ids[0]), "000000000000a");
        assert_eq!(short.short(ids[1]), "100000000000a");
        assert_eq!(ShortIds::new([ids[0]]).short(ids[0]), "0000000a");
        assert_eq!(short_id(ids[0]), "0000000a");
    }
}
