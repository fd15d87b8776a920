//! What a report of an evaluation shows, whatever its form.

use anyhow::Context;
use serde_json::Value;

use crate::domain::evaluation::{EvalResult, EvalState, VersionTotals};
use crate::settings::choice::Choice;

/// An evaluation that has ended.
pub struct EvalReport {
    /// As the daemon sent it.
    pub eval: Value,
    pub state: EvalState,
    pub result: EvalResult,
    /// As the daemon sent them; only for a report that lists them.
    pub cases: Vec<Value>,
}

/// A number of both versions.
pub struct Amount {
    pub name: &'static str,
    pub new: String,
    /// Empty without an old version.
    pub old: String,
    /// How much more the new version has, such as `+12 %`.
    pub change: String,
}

impl EvalReport {
    pub fn new(eval: Value) -> anyhow::Result<Self> {
        let state = EvalState::named(eval["state"].as_str().unwrap_or_default());
        let state = state.context("the daemon sent an evaluation in an unknown state")?;
        let result = match &eval["result"] {
            Value::Null => EvalResult::default(),
            result => serde_json::from_value(result.clone())
                .context("the daemon sent a result that this version does not know")?,
        };
        Ok(Self {
            eval,
            state,
            result,
            cases: Vec::new(),
        })
    }

    pub fn text(&self, field: &str) -> &str {
        self.eval[field].as_str().unwrap_or_default()
    }

    /// `planner (sha256:60303ae2)`, of the new or the old version.
    pub fn version(&self, index: usize) -> Option<String> {
        let version = self.eval["versions"].get(index)?;
        let digest = version["version"].as_str().unwrap_or_default();
        let digest: String = digest.chars().take("sha256:".len() + 8).collect();
        Some(format!(
            "{} ({digest})",
            version["agent"].as_str().unwrap_or_default()
        ))
    }

    /// What the versions took.
    pub fn amounts(&self) -> Vec<Amount> {
        let new = &self.result.totals;
        let old = self.result.against.as_ref();
        let seconds = |milliseconds: Option<u64>| milliseconds.map(|it| it as f64 / 1e3);
        type Number = fn(&VersionTotals) -> Option<f64>;
        let numbers: [(&'static str, Number); 4] = [
            ("cost (USD)", |it| it.cost),
            ("tokens", |it| Some(it.tokens)),
            ("turns", |it| Some(it.turns)),
            ("tool calls", |it| Some(it.tool_calls)),
        ];
        let mut amounts: Vec<Amount> = numbers
            .into_iter()
            .map(|(name, number)| amount(name, number(new), old.map(number)))
            .collect();
        let percentiles = [
            ("p50 (s)", new.duration.p50, old.map(|it| it.duration.p50)),
            ("p95 (s)", new.duration.p95, old.map(|it| it.duration.p95)),
        ];
        for (name, new, old) in percentiles {
            amounts.push(amount(name, seconds(new), old.map(seconds)));
        }
        let errors = |it: &VersionTotals| it.errors.values().sum::<u64>() as f64;
        amounts.push(amount(
            "errors",
            Some(errors(new)),
            old.map(|it| Some(errors(it))),
        ));
        let diverged = |it: &VersionTotals| it.diverged as f64;
        amounts.push(amount(
            "diverged",
            Some(diverged(new)),
            old.map(|it| Some(diverged(it))),
        ));
        amounts
    }
}

fn amount(name: &'static str, new: Option<f64>, old: Option<Option<f64>>) -> Amount {
    let text = |number: Option<f64>| number.map_or_else(|| "-".to_owned(), short);
    let change = new.zip(old.flatten()).filter(|(_, old)| *old > 0.0);
    let change = change.map(|(new, old)| (new / old - 1.0) * 100.0);
    Amount {
        name,
        new: text(new),
        old: old.map_or_else(String::new, text),
        change: change.map_or_else(String::new, |percent| format!("{percent:+.1} %")),
    }
}

/// At most four decimals, without zeros at the end.
pub fn short(number: f64) -> String {
    let text = format!("{number:.4}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0" } else { text }.to_owned()
}

/// With a sign.
pub fn signed(number: f64) -> String {
    let text = short(number);
    match text.starts_with('-') || text == "0" {
        true => text,
        false => format!("+{text}"),
    }
}

#[cfg(test)]
mod tests {
    use super::{amount, short, signed};

    #[test]
    fn numbers_are_short() {
        assert_eq!((&*short(1.0), &*short(0.12345)), ("1", "0.1235"));
        assert_eq!((&*short(-0.00001), &*signed(0.5)), ("0", "+0.5"));
        let cost = amount("cost", Some(1.1), Some(Some(1.0)));
        assert_eq!((&*cost.change, &*cost.old), ("+10.0 %", "1"));
        let alone = amount("cost", None, None);
        assert_eq!((&*alone.new, &*alone.old, &*alone.change), ("-", "", ""));
    }
}
