//! Gates of an evaluation: what a new version of an agent has to fulfil, such as `cost <= 1.1x`.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::settings::choice::{Choice, choice};

/// A condition for the result of an evaluation.
#[derive(Clone, Debug, PartialEq)]
pub struct Gate {
    text: String,
    measure: Measure,
    bound: f64,
}

#[derive(Clone, Debug, PartialEq)]
enum Measure {
    /// The lower end of the interval of a scorer's difference.
    Low(String),
    /// A scorer's mean.
    Mean(String),
    Ratio(Amount),
    AddedErrors,
    DivergedShare,
}

choice! {
    /// What a version takes for the cases.
    #[derive(PartialOrd, Ord)]
    pub enum Amount {
        Cost = "cost",
        Tokens = "tokens",
        Turns = "turns",
        ToolCalls = "tool_calls",
        P50 = "p50",
        P95 = "p95",
    }
}

/// What an evaluation has measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Measures {
    /// Whether there is an old version to compare with.
    pub has_old: bool,
    pub scorers: BTreeMap<String, ScorerMeasures>,
    /// Of the new and the old version; only those that are known for both.
    pub amounts: BTreeMap<Amount, (f64, f64)>,
    /// The errors of the new version minus those of the old one.
    pub added_errors: i64,
    /// The share of the cases that diverged; none without cases.
    pub diverged_share: Option<f64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ScorerMeasures {
    /// Of the new version.
    pub mean: Option<f64>,
    /// The lower end of the difference's interval.
    pub low: Option<f64>,
}

/// What became of a gate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct GateOutcome {
    /// The gate as the request has it.
    pub gate: String,
    /// Whether the result meets it.
    pub held: bool,
    /// What is compared with the gate's bound; none where nothing was measured, and then the gate does not hold.
    pub actual: Option<f64>,
    /// The numbers that decide.
    pub why: String,
}

/// Longer texts are not read.
const MAX_LENGTH: usize = 256;
/// What sums of fractions lose decides nothing.
const ROUNDING: f64 = 1e-9;

impl Gate {
    /// # Errors
    /// The second half of a sentence that begins with the gate or its key.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.len() > MAX_LENGTH {
            return Err(format!("is longer than {MAX_LENGTH} bytes"));
        }
        let text = text.trim();
        let (measure, bound) = match (text.split_once(">="), text.split_once("<=")) {
            (Some((name, bound)), None) => (scorer_measure(name.trim())?, number(bound, "")?),
            (None, Some((name, bound))) => limit(name.trim(), bound)?,
            _ => {
                return Err(
                    "must have one >= or <=, such as 'grounded >= -0.02', 'grounded.mean >= 0.8', 'cost <= 1.1x', \
                     'errors <= 0' or 'diverged <= 5%'"
                        .to_owned(),
                );
            }
        };
        Ok(Self {
            text: text.to_owned(),
            measure,
            bound,
        })
    }

    /// The name of the scorer that the gate needs.
    pub fn scorer(&self) -> Option<&str> {
        match &self.measure {
            Measure::Low(scorer) | Measure::Mean(scorer) => Some(scorer),
            Measure::Ratio(_) | Measure::AddedErrors | Measure::DivergedShare => None,
        }
    }

    /// Whether it compares the new version with an old one.
    pub fn needs_old_version(&self) -> bool {
        !matches!(self.measure, Measure::Mean(_) | Measure::DivergedShare)
    }

    pub fn check(&self, measures: &Measures) -> GateOutcome {
        let (held, actual, why) = match self.actual(measures) {
            Ok(actual) => {
                let held = self.holds(actual);
                (held, Some(actual), self.describe(actual, held))
            }
            Err(why) => (false, None, why),
        };
        GateOutcome {
            gate: self.text.clone(),
            held,
            actual,
            why,
        }
    }

    /// What is compared with the bound, or why there is nothing to compare.
    fn actual(&self, measures: &Measures) -> Result<f64, String> {
        if !measures.has_old && self.needs_old_version() {
            return Err("there is no old version to compare with".to_owned());
        }
        let scorer = |name: &String| {
            let names: Vec<&str> = measures.scorers.keys().map(String::as_str).collect();
            let missing = || format!("there is no scorer {name} among: {}", names.join(", "));
            measures.scorers.get(name).ok_or_else(missing)
        };
        let (actual, missing) = match &self.measure {
            Measure::Low(name) => (
                scorer(name)?.low,
                format!("fewer than two cases have values of {name} for both versions"),
            ),
            Measure::Mean(name) => (scorer(name)?.mean, format!("no case has a value of {name}")),
            Measure::Ratio(amount) => (
                measures.ratio(*amount),
                format!(
                    "{} of a version is unknown, or 0 only for the old one",
                    amount.as_str()
                ),
            ),
            Measure::AddedErrors => (Some(measures.added_errors as f64), String::new()),
            Measure::DivergedShare => (measures.diverged_share, "there are no cases".to_owned()),
        };
        actual.ok_or(missing)
    }

    fn holds(&self, actual: f64) -> bool {
        let excess = match self.scorer() {
            Some(_) => self.bound - actual,
            None => actual - self.bound,
        };
        excess <= ROUNDING * self.bound.abs().max(1.0)
    }

    fn describe(&self, actual: f64, held: bool) -> String {
        let relation = match (held, self.scorer().is_some()) {
            (true, true) => "at least",
            (true, false) => "at most",
            (false, true) => "less than",
            (false, false) => "more than",
        };
        let (subject, factor, unit) = match &self.measure {
            Measure::Low(scorer) => (format!("the lower end of {scorer}'s difference"), 1.0, ""),
            Measure::Mean(scorer) => (format!("the mean of {scorer}"), 1.0, ""),
            Measure::Ratio(amount) => (
                format!("{} compared with the old version", amount.as_str()),
                1.0,
                "x",
            ),
            Measure::AddedErrors => ("the change in errors".to_owned(), 1.0, ""),
            Measure::DivergedShare => ("the share of diverged cases".to_owned(), 100.0, "%"),
        };
        let texts = |decimals| [actual, self.bound].map(|number| short(number * factor, decimals));
        let [actual, bound] = match texts(4) {
            [actual, bound] if actual == bound => texts(9),
            different => different,
        };
        format!("{subject} is {actual}{unit}, {relation} {bound}{unit}")
    }
}

impl Measures {
    fn ratio(&self, amount: Amount) -> Option<f64> {
        match *self.amounts.get(&amount)? {
            (new, old) if old > 0.0 => Some(new / old),
            (new, _) => (new <= 0.0).then_some(1.0),
        }
    }
}

/// Reads what stands before `>=`.
fn scorer_measure(name: &str) -> Result<Measure, String> {
    if Amount::named(name).is_some() || matches!(name, "errors" | "diverged") {
        return Err(format!(
            "has \"{name}\" before >=: less is better, so write <="
        ));
    }
    let mean_of = name.strip_suffix(".mean");
    let scorer = mean_of.unwrap_or(name);
    let is_letter = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_');
    if scorer.is_empty() || !scorer.chars().all(is_letter) {
        return Err(format!(
            "has \"{name}\" before >=: it must be a scorer (letters, digits, - and _) or its mean, such as grounded.mean"
        ));
    }
    Ok(match mean_of {
        Some(_) => Measure::Mean(scorer.to_owned()),
        None => Measure::Low(scorer.to_owned()),
    })
}

/// Reads what stands before and after `<=`.
fn limit(name: &str, bound: &str) -> Result<(Measure, f64), String> {
    if let Some(amount) = Amount::named(name) {
        return Ok((Measure::Ratio(amount), number(bound, "x")?));
    }
    match name {
        "errors" => match number(bound, "")? {
            whole if whole.fract() == 0.0 => Ok((Measure::AddedErrors, whole)),
            other => Err(format!(
                "has \"{other}\" as limit: it must be a whole number"
            )),
        },
        "diverged" => Ok((Measure::DivergedShare, number(bound, "%")? / 100.0)),
        _ => Err(format!(
            "has \"{name}\" before <=: it must be {}, errors or diverged; for scorers, write >=",
            Amount::list_names()
        )),
    }
}

fn number(text: &str, unit: &str) -> Result<f64, String> {
    let (range, expected) = match unit {
        "x" => (0.0..=f64::MAX, "a factor, such as 1.1x"),
        "%" => (0.0..=100.0, "a share from 0% to 100%"),
        _ => (f64::MIN..=f64::MAX, "a number, such as 0 or -0.02"),
    };
    let text = text.trim();
    let digits = text.strip_suffix(unit).map(str::trim_end);
    // The standard library also reads "inf", "nan", "+1" and "1e3".
    let digits = digits.filter(|it| {
        it.bytes()
            .all(|byte| matches!(byte, b'0'..=b'9' | b'.' | b'-'))
    });
    let number = digits.and_then(|digits| digits.parse().ok());
    number
        .filter(|number| range.contains(number))
        .ok_or_else(|| format!("has \"{text}\" as limit: it must be {expected}"))
}

fn short(number: f64, decimals: usize) -> String {
    let text = format!("{number:.decimals$}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0" } else { text }.to_owned()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::{Amount, Gate, GateOutcome, Measures, ScorerMeasures, short};

    fn measures() -> Measures {
        let grounded = ScorerMeasures {
            mean: Some(0.85),
            low: Some(-0.03),
        };
        Measures {
            has_old: true,
            scorers: BTreeMap::from([
                ("grounded".to_owned(), grounded),
                ("tone-2".to_owned(), ScorerMeasures::default()),
            ]),
            amounts: BTreeMap::from([
                (Amount::Cost, (1.32, 1.2)),
                (Amount::Tokens, (900.0, 1000.0)),
                (Amount::Turns, (0.0, 0.0)),
                (Amount::ToolCalls, (2.0, 0.0)),
            ]),
            added_errors: 3,
            diverged_share: Some(0.075),
        }
    }

    fn check(gate: &str, measures: &Measures) -> GateOutcome {
        Gate::parse(gate).expect(gate).check(measures)
    }

    #[test]
    fn gates_compare_what_was_measured() {
        let lines = "
            grounded >= -0.02: -0.03: the lower end of grounded's difference is -0.03, less than -0.02
            grounded>=-0.03: -0.03: the lower end of grounded's difference is -0.03, at least -0.03
            grounded.mean >= 0.8: 0.85: the mean of grounded is 0.85, at least 0.8
            grounded.mean >= 0.850001: 0.85: the mean of grounded is 0.85, less than 0.850001
            tone-2 >= 0: : fewer than two cases have values of tone-2 for both versions
            tone-2.mean >= 0: : no case has a value of tone-2
            tone >= 0: : there is no scorer tone among: grounded, tone-2
            cost <= 1.1x: 1.1: cost compared with the old version is 1.1x, at most 1.1x
            cost <= 1x: 1.1: cost compared with the old version is 1.1x, more than 1x
            tokens <= 0.9 x: 0.9: tokens compared with the old version is 0.9x, at most 0.9x
            turns <= 1x: 1: turns compared with the old version is 1x, at most 1x
            tool_calls <= 9x: : tool_calls of a version is unknown, or 0 only for the old one
            p95 <= 1.2x: : p95 of a version is unknown, or 0 only for the old one
            errors <= 0: 3: the change in errors is 3, more than 0
            errors <= 3: 3: the change in errors is 3, at most 3
            diverged <= 7.5%: 0.075: the share of diverged cases is 7.5%, at most 7.5%
            diverged <= 5%: 0.075: the share of diverged cases is 7.5%, more than 5%";
        for line in lines.trim().lines() {
            let parts: Vec<&str> = line.trim().splitn(3, ": ").collect();
            let outcome = check(parts[0], &measures());
            let actual = outcome.actual.map_or(String::new(), |it| short(it, 4));
            assert_eq!([&outcome.gate, &actual, &outcome.why], parts[..]);
            assert_eq!(outcome.held, parts[2].contains(", at "), "{outcome:?}");
        }
    }

    #[test]
    fn comparisons_need_an_old_version() {
        let alone = Measures {
            has_old: false,
            added_errors: 0,
            ..measures()
        };
        for gate in ["grounded >= -1", "cost <= 9x", "p50 <= 9x", "errors <= 9"] {
            let outcome = check(gate, &alone);
            assert_eq!((outcome.held, outcome.actual), (false, None));
            assert_eq!(outcome.why, "there is no old version to compare with");
        }
        assert!(check("grounded.mean >= 0.8", &alone).held);
        assert!(check("diverged <= 10%", &alone).held);
        assert!(!check("diverged <= 10%", &Measures::default()).held);
    }

    #[test]
    fn gates_name_their_scorer() {
        let scorer = |gate| Gate::parse(gate).map(|gate| gate.scorer().map(str::to_owned));
        assert_eq!(scorer("a_b-2.mean >= 1"), Ok(Some("a_b-2".to_owned())));
        assert_eq!(scorer("p50 <= 1x"), Ok(None));
    }

    #[test]
    fn errors_name_what_is_wrong_and_what_is_valid() {
        let lines = "
            grounded > 0: must have one >= or <=, such as 'grounded >= -0.02', 'grounded.mean >= 0.8', 'cost <= 1.1x'
            a >= 0 <= 1: must have one >= or <=
            a >= 0 >= 1: has \"0 >= 1\" as limit: it must be a number, such as 0 or -0.02
            >= 0: has \"\" before >=: it must be a scorer
            a.median >= 0: has \"a.median\" before >=: it must be a scorer
            cost >= 1x: has \"cost\" before >=: less is better, so write <=
            grounded <= 1: has \"grounded\" before <=: it must be cost, tokens, turns, tool_calls, p50, p95, errors or diverged; for scorers
            grounded >= 1%: has \"1%\" as limit: it must be a number
            grounded >= inf: has \"inf\" as limit
            grounded >=: has \"\" as limit
            cost <= 1.1: has \"1.1\" as limit: it must be a factor, such as 1.1x
            cost <= -1x: has \"-1x\" as limit: it must be a factor
            diverged <= 101%: has \"101%\" as limit: it must be a share from 0% to 100%
            errors <= 0.5: has \"0.5\" as limit: it must be a whole number";
        for line in lines.trim().lines() {
            let (gate, expected) = line.trim().split_once(": ").expect("a gate and its error");
            let error = Gate::parse(gate).expect_err(gate);
            assert!(error.starts_with(expected), "{gate}: {error}");
        }
        let too_long = Gate::parse(&"a".repeat(257)).expect_err("too long");
        assert_eq!(too_long, "is longer than 256 bytes");
    }
}
