//! A run as the user names it: by its id, or by the beginning of it.

use std::str::FromStr;

use serde::Deserialize;

use crate::cli::client::Client;
use crate::cli::exit::InvalidInput;
use crate::domain::run::RunId;
use crate::domain::terminal_text;

/// The last id there is.
const LAST_ID: &str = "ffffffff-ffff-ffff-ffff-ffffffffffff";
/// Digits of an id, and the least of a short one: the time in milliseconds and 12 bits of a counter.
const DIGITS: usize = 32;
const MIN_SHORT_DIGITS: usize = 16;
/// Most matches of an ambiguous beginning that an error names.
const MAX_MATCHES: usize = 10;

/// The beginning of an id, or a whole one, without `run_`.
#[derive(Clone, Debug)]
pub struct RunRef(String);

impl FromStr for RunRef {
    type Err = InvalidInput;

    /// `run_` and the dashes may be left out.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let id = text.to_ascii_lowercase();
        let digits = id.strip_prefix("run_").unwrap_or(&id).replace('-', "");
        let is_id = (1..=DIGITS).contains(&digits.len())
            && digits.chars().all(|digit| digit.is_ascii_hexdigit());
        match is_id {
            true => Ok(Self(with_dashes(&digits))),
            false => Err(InvalidInput(
                "a run id is run_ and a UUID, or the beginning of one; axed runs list shows them"
                    .to_owned(),
            )),
        }
    }
}

/// The digits with the dashes of a UUID.
fn with_dashes(digits: &str) -> String {
    let mut digits = digits.chars();
    let mut id = String::new();
    while let Some(digit) = digits.next() {
        id.push(digit);
        if LAST_ID[id.len()..].starts_with('-') && !digits.as_str().is_empty() {
            id.push('-');
        }
    }
    id
}

#[derive(Deserialize)]
struct Match {
    id: RunId,
    agent: String,
    created_at: String,
}

impl RunRef {
    /// The id of the one run that it names.
    ///
    /// # Errors
    /// No run's id begins so, or those of several do.
    pub async fn resolve(&self, client: &Client) -> anyhow::Result<String> {
        if self.0.len() == LAST_ID.len() {
            return Ok(format!("run_{}", self.0));
        }
        let mut matches = self.matches(client).await?;
        if matches.len() == 1 {
            return Ok(matches.remove(0).id.to_string());
        }
        if matches.is_empty() {
            return Err(InvalidInput(format!(
                "there is no run whose id begins with run_{} at {}; axed runs list --all lists them",
                self.0,
                client.base()
            ))
            .into());
        }
        let mut message = format!("several runs have ids that begin with run_{}:", self.0);
        for found in matches.iter().take(MAX_MATCHES) {
            let agent = terminal_text::sanitize_line(&found.agent);
            let created = terminal_text::sanitize_line(&found.created_at);
            message.push_str(&format!("\n  {}  {agent}  {created}", found.id));
        }
        if matches.len() > MAX_MATCHES {
            message.push_str("\n  and others");
        }
        Err(InvalidInput(message).into())
    }

    /// At least two of the runs, if there are several.
    async fn matches(&self, client: &Client) -> anyhow::Result<Vec<Match>> {
        let filters = [("all".to_owned(), "true".to_owned())];
        let begins = format!("run_{}", self.0);
        // A list begins below its cursor. Ids sort as texts, so those that begin so are the first ones.
        let mut cursor = Some(format!("{begins}{}", &LAST_ID[self.0.len()..]));
        let mut matches = Vec::new();
        while let Some(at) =
            cursor.filter(|at| at.starts_with(&begins) && matches.len() <= MAX_MATCHES)
        {
            let page = client
                .list_runs(&filters, MAX_MATCHES + 1, Some(&at))
                .await?;
            for run in page.data {
                let run: Match = serde_json::from_value(run)?;
                if run.id.to_string().starts_with(&begins) {
                    matches.push(run);
                }
            }
            cursor = page.next_cursor;
        }
        Ok(matches)
    }
}

/// Shortens ids so far that each of a set still differs from the others.
pub struct ShortIds(usize);

impl ShortIds {
    pub fn new(ids: impl IntoIterator<Item = RunId>) -> Self {
        let mut ids: Vec<String> = ids.into_iter().map(digits).collect();
        ids.sort_unstable();
        ids.dedup();
        let pairs = ids.windows(2).map(|pair| {
            let same = pair[0].chars().zip(pair[1].chars());
            same.take_while(|(one, other)| one == other).count() + 1
        });
        Self(pairs.max().unwrap_or(0).max(MIN_SHORT_DIGITS))
    }

    /// The first digits of the id, without `run_` and dashes.
    pub fn short(&self, id: RunId) -> String {
        digits(id).chars().take(self.0).collect()
    }
}

fn digits(id: RunId) -> String {
    id.0.as_simple().to_string()
}

#[cfg(test)]
mod tests {
    use super::{RunRef, ShortIds};

    #[test]
    fn a_beginning_is_hexadecimal_with_or_without_dashes() {
        let parsed = |text: &str| text.parse().map(|RunRef(id)| id).ok();
        for (text, id) in [
            ("run_01890A5d", "01890a5d"),
            ("01890a5dac967", "01890a5d-ac96-7"),
            ("01890a5d-ac96-7", "01890a5d-ac96-7"),
            (
                "01890a5dac96774bbcceb302099a8057",
                "01890a5d-ac96-774b-bcce-b302099a8057",
            ),
        ] {
            assert_eq!(parsed(text).as_deref(), Some(id), "{text}");
        }
        for text in [
            "",
            "run_",
            "..",
            "-",
            "xyz",
            "01890a5d-ac96-774b-bcce-b302099a80570",
        ] {
            assert_eq!(parsed(text), None, "{text}");
        }
    }

    #[test]
    fn short_ids_differ() {
        let ids = [
            "7000-8000-00000000000a",
            "7000-8000-00000001000a",
            "7000-8000-00000001000a",
        ];
        let ids = ids.map(|end| format!("run_01980000-0000-{end}").parse().expect("an id"));
        let short = ShortIds::new(ids);
        assert_eq!(short.short(ids[0]), "0198000000007000800000000000");
        assert_eq!(short.short(ids[1]), "0198000000007000800000000001");
        assert_eq!(ShortIds::new([ids[0]]).short(ids[0]), "0198000000007000");
    }
}
