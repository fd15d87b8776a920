//! Scores of runs: how good somebody, or a scorer, says that one is.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::{self, Display};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::domain::name::is_name;

/// Most characters of a label.
pub const MAX_LABEL_CHARS: usize = 64;
/// Most characters of a comment.
pub const MAX_COMMENT_CHARS: usize = 2_000;
/// The author of scores that come by a feedback link.
pub const FEEDBACK: &str = "feedback";
/// What the authors of a scorer's scores begin with.
pub const SCORER_PREFIX: &str = "scorer:";

/// Steps of a number for 1.
const STEPS: i64 = 1_000_000_000;
const MAX_NUMBER: f64 = 1e9;
const EXPECTED: &str = "a number from -1000000000 to 1000000000, true, false, or a label";

/// Whether a score may have this name.
pub fn is_score_name(name: &str) -> bool {
    is_name(name)
}

/// A number, rounded to nine decimals: so sums of scores are exact, and a score can be taken out of them again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ScoreNumber {
    /// Billionths.
    pub steps: i64,
}

impl ScoreNumber {
    pub const ONE: Self = Self { steps: STEPS };

    /// `None` if it is not finite, or above a billion.
    pub fn new(number: f64) -> Option<Self> {
        let steps = (number * STEPS as f64).round() as i64;
        (number.abs() <= MAX_NUMBER).then_some(Self { steps })
    }

    pub fn to_f64(self) -> f64 {
        self.steps as f64 / STEPS as f64
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScoreValue {
    /// Of true and false, 1 and 0.
    Number(ScoreNumber),
    /// At most [`MAX_LABEL_CHARS`] characters, without control characters.
    Label(String),
}

impl ScoreValue {
    /// # Errors
    /// The end of a sentence about the text.
    pub fn label(text: &str) -> Result<Self, String> {
        let is_label = !text.is_empty()
            && text.chars().count() <= MAX_LABEL_CHARS
            && !text.chars().any(char::is_control);
        match is_label {
            true => Ok(Self::Label(text.to_owned())),
            false => Err(format!(
                "is no label: it has 1 to {MAX_LABEL_CHARS} characters, none of them a control character"
            )),
        }
    }
}

impl Display for ScoreValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.to_f64().fmt(f),
            Self::Label(text) => f.write_str(text),
        }
    }
}

impl Serialize for ScoreValue {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Number(number) if number.steps % STEPS == 0 => {
                serializer.serialize_i64(number.steps / STEPS)
            }
            Self::Number(number) => serializer.serialize_f64(number.to_f64()),
            Self::Label(text) => serializer.serialize_str(text),
        }
    }
}

impl<'de> Deserialize<'de> for ScoreValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor)
    }
}

struct ValueVisitor;

impl Visitor<'_> for ValueVisitor {
    type Value = ScoreValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(EXPECTED)
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<ScoreValue, E> {
        self.visit_f64(f64::from(u8::from(value)))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<ScoreValue, E> {
        self.visit_f64(value as f64)
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<ScoreValue, E> {
        self.visit_f64(value as f64)
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<ScoreValue, E> {
        let number = ScoreNumber::new(value).map(ScoreValue::Number);
        number.ok_or_else(|| E::custom(format_args!("is not {EXPECTED}")))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<ScoreValue, E> {
        ScoreValue::label(text).map_err(E::custom)
    }
}

impl JsonSchema for ScoreValue {
    fn schema_name() -> Cow<'static, str> {
        "ScoreValue".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "A number with at most nine decimals, true or false (1 or 0), or a label.",
            "oneOf": [
                {"type": "number", "minimum": -MAX_NUMBER, "maximum": MAX_NUMBER},
                {"type": "boolean"},
                {"type": "string", "minLength": 1, "maxLength": MAX_LABEL_CHARS},
            ],
        })
    }
}

/// The count and the exact sums of numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moments {
    pub n: u64,
    /// In steps.
    pub sum: i128,
    /// In squares of steps.
    pub squares: i128,
}

impl Moments {
    pub fn add(&mut self, other: &Self) {
        self.n = self.n.saturating_add(other.n);
        self.sum = self.sum.saturating_add(other.sum);
        self.squares = self.squares.saturating_add(other.squares);
    }

    pub fn add_number(&mut self, number: ScoreNumber) {
        let steps = i128::from(number.steps);
        self.add(&Self {
            n: 1,
            sum: steps,
            squares: steps * steps,
        });
    }

    /// `None` of no numbers.
    pub fn mean(&self) -> Option<f64> {
        (self.n > 0).then(|| rounded(self.sum as f64 / self.n as f64 / STEPS as f64))
    }

    /// The variance of a sample; `None` of fewer than two numbers.
    pub fn variance(&self) -> Option<f64> {
        let n = i128::from(self.n);
        let (count, step) = (self.n as f64, STEPS as f64);
        if n < 2 {
            return None;
        }
        // Exact where it fits; only sums of large numbers do not.
        let spread = n
            .checked_mul(self.squares)
            .zip(self.sum.checked_mul(self.sum));
        let spread = match spread {
            Some((squares, square)) => (squares - square) as f64,
            None => count * self.squares as f64 - self.sum as f64 * self.sum as f64,
        };
        Some((spread / count / (count - 1.0) / step / step).max(0.0))
    }
}

/// Without the noise of a division behind the decimals that numbers have.
fn rounded(number: f64) -> f64 {
    (number * 1e12).round() / 1e12
}

/// The scores of one name that a run, or a group of runs, has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScoreSummary {
    pub numbers: Moments,
    /// The number of scores with each label.
    pub labels: BTreeMap<String, u64>,
}

/// By name.
pub type RunScores = BTreeMap<String, ScoreSummary>;

impl ScoreSummary {
    pub fn add(&mut self, value: ScoreValue) {
        match value {
            ScoreValue::Number(number) => self.numbers.add_number(number),
            ScoreValue::Label(label) => *self.labels.entry(label).or_default() += 1,
        }
    }

    pub fn n(&self) -> u64 {
        self.numbers.n + self.labels.values().sum::<u64>()
    }
}

impl Serialize for ScoreSummary {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("n", &self.n())?;
        if let Some(mean) = self.numbers.mean() {
            map.serialize_entry("mean", &mean)?;
        }
        if !self.labels.is_empty() {
            map.serialize_entry("counts", &self.labels)?;
        }
        map.end()
    }
}

impl JsonSchema for ScoreSummary {
    fn schema_name() -> Cow<'static, str> {
        "ScoreSummary".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "The scores of one name.",
            "type": "object",
            "properties": {
                "n": {"type": "integer", "minimum": 0, "description": "The number of scores."},
                "mean": {"type": "number", "description": "The mean of the numbers; absent if there are labels only."},
                "counts": {
                    "type": "object", "additionalProperties": {"type": "integer"},
                    "description": "The number of scores with each label; absent without labels.",
                },
            },
            "required": ["n"],
        })
    }
}

/// What a list of runs asks of the scores of one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScoreFilter {
    pub name: String,
    pub condition: ScoreCondition,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScoreCondition {
    /// Of the mean.
    Below(ScoreNumber),
    AtMost(ScoreNumber),
    Above(ScoreNumber),
    AtLeast(ScoreNumber),
    /// One of the scores is this label.
    Label(String),
    /// There is no score.
    None,
}

/// Makes a condition of a bound.
type Comparison = fn(ScoreNumber) -> ScoreCondition;

impl ScoreCondition {
    pub const EXPECTED: &str = "<0.5, <=0.5, >0.5, >=0.5, =label or none";

    pub fn parse(text: &str) -> Option<Self> {
        if text == "none" {
            return Some(Self::None);
        }
        if let Some(label) = text.strip_prefix('=') {
            return ScoreValue::label(label)
                .ok()
                .map(|_| Self::Label(label.to_owned()));
        }
        let number = |text: &str| ScoreNumber::new(text.trim().parse().ok()?);
        let comparisons: [(&str, Comparison); 4] = [
            ("<=", Self::AtMost),
            (">=", Self::AtLeast),
            ("<", Self::Below),
            (">", Self::Above),
        ];
        let (rest, condition) = comparisons
            .into_iter()
            .find_map(|(sign, condition)| Some((text.strip_prefix(sign)?, condition)))?;
        number(rest).map(condition)
    }
}

impl ScoreFilter {
    /// A name with a condition on one line, such as `thumbs<1`, `tone=friendly` or `thumbs none`.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let at = text.find(['<', '>', '=', ' '])?;
        let (name, condition) = text.split_at(at);
        let condition = ScoreCondition::parse(condition.trim())?;
        is_score_name(name).then(|| Self {
            name: name.to_owned(),
            condition,
        })
    }

    pub fn includes(&self, scores: &RunScores) -> bool {
        let summary = scores.get(&self.name);
        let compare = |is: fn(&i128, &i128) -> bool, bound: ScoreNumber| {
            summary.is_some_and(|it| {
                let n = i128::from(it.numbers.n);
                n > 0 && is(&it.numbers.sum, &(n * i128::from(bound.steps)))
            })
        };
        match &self.condition {
            ScoreCondition::Below(bound) => compare(i128::lt, *bound),
            ScoreCondition::AtMost(bound) => compare(i128::le, *bound),
            ScoreCondition::Above(bound) => compare(i128::gt, *bound),
            ScoreCondition::AtLeast(bound) => compare(i128::ge, *bound),
            ScoreCondition::Label(label) => summary.is_some_and(|it| it.labels.contains_key(label)),
            ScoreCondition::None => summary.is_none(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        Moments, RunScores, ScoreCondition, ScoreFilter, ScoreNumber, ScoreSummary, ScoreValue,
    };

    fn value(json: &str) -> Result<ScoreValue, String> {
        serde_json::from_str(json).map_err(|error| error.to_string())
    }

    #[test]
    fn values_are_numbers_flags_and_labels() {
        for (json, written) in [
            ("0.1", "0.1"),
            ("1", "1"),
            ("-3.5", "-3.5"),
            ("true", "1"),
            ("false", "0"),
            ("0.3333333333333", "0.333333333"),
            ("\"helpful\"", "\"helpful\""),
        ] {
            let read = value(json).expect("a value");
            assert_eq!(serde_json::to_string(&read).expect("JSON"), written);
        }
        for json in [
            "1e10",
            "\"\"",
            "\"a\\nb\"",
            "null",
            "[1]",
            &format!("\"{}\"", "x".repeat(65)),
        ] {
            assert!(value(json).is_err(), "{json}");
        }
    }

    #[test]
    fn sums_are_those_of_a_slow_calculation() {
        let numbers = [0.1, 0.2, 0.30, -4.0, 12.125, 0.1];
        let mut moments = Moments::default();
        for number in numbers {
            moments.add_number(ScoreNumber::new(number).expect("a number"));
        }
        let mean = numbers.iter().sum::<f64>() / 6.0;
        let variance = numbers.iter().map(|it| (it - mean).powi(2)).sum::<f64>() / 5.0;
        assert!((moments.mean().expect("a mean") - mean).abs() < 1e-12);
        assert!((moments.variance().expect("a variance") - variance).abs() < 1e-9);
        let mut one = Moments::default();
        one.add_number(ScoreNumber::new(0.1).expect("a number"));
        assert_eq!((one.mean(), one.variance()), (Some(0.1), None));
        let large = ScoreNumber::new(1e9).expect("a number");
        let mut extreme = Moments::default();
        (0..1_000).for_each(|_| extreme.add_number(large));
        assert_eq!(extreme.mean(), Some(1e9));
    }

    #[test]
    fn conditions_compare_the_mean() {
        let mut summary = ScoreSummary::default();
        for json in ["0.2", "0.4", "\"ok\""] {
            summary.add(value(json).expect("a value"));
        }
        let scores = RunScores::from([("good".to_owned(), summary)]);
        let includes = |name: &str, text: &str| {
            let condition = ScoreCondition::parse(text).expect("a condition");
            let name = name.to_owned();
            ScoreFilter { name, condition }.includes(&scores)
        };
        assert!(includes("good", "<0.31") && !includes("good", "<0.3"));
        assert!(
            includes("good", "<=0.3") && includes("good", ">=0.3") && !includes("good", ">0.3")
        );
        assert!(includes("good", "=ok") && !includes("good", "=bad"));
        assert!(includes("other", "none") && !includes("good", "none") && !includes("other", "<1"));
        let parsed = ScoreFilter::parse("tone=very friendly").expect("a filter");
        assert_eq!(
            parsed.condition,
            ScoreCondition::Label("very friendly".to_owned())
        );
        assert!(
            ScoreFilter::parse("thumbs none").is_some()
                && ScoreFilter::parse("thumbs <=1").is_some()
        );
        assert!(ScoreFilter::parse("<1").is_none() && ScoreFilter::parse("thumbs").is_none());
        for text in ["", "0.5", "<", "<x", "= ", "=", "nan", "<nan"] {
            assert!(
                ScoreCondition::parse(text).is_none() || text == "= ",
                "{text}"
            );
        }
    }
}
