//! Query parameters. A struct lists those of a route, with their descriptions; any other is refused, because a mistyped filter
//! would show everything. An error names the parameter that is wrong.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::str::FromStr;

use axum::extract::FromRequestParts;
use axum::http::Uri;
use axum::http::request::Parts;
use jiff::Timestamp;
use jiff::fmt::temporal::Pieces;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::value::{MapAccessDeserializer, MapDeserializer};
use serde::de::{DeserializeOwned, DeserializeSeed, IntoDeserializer, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, de, forward_to_deserialize_any};

use crate::config::environment::is_valid_name;
use crate::domain::agent::is_agent_name;
use crate::domain::run::RunId;
use crate::domain::run_ref::RunRef;
use crate::domain::score::{ScoreCondition, ScoreFilter, is_score_name};
use crate::domain::search_text::{MAX_SEARCH_CHARS, SearchText};
use crate::domain::usage::Cost;
use crate::web::auth::Principal;
use crate::web::error::{Problem, did_you_mean, quote};
use crate::web::extract::path;
use crate::web::problem_code::ProblemCode;
use crate::web::route::{Input, Route};
use crate::web::state::AppState;

/// Maximum parameters of a query: each is compared with all before it.
const MAX_PARAMETERS: usize = 200;
/// Maximum labels of one filter.
const MAX_LABELS: usize = 64;

/// The parameters of a query. A field whose name ends in a dot has all parameters with that prefix.
#[derive(Debug)]
pub struct Query<T>(pub T);

/// A route without query parameters.
pub type NoQuery = Query<NoParameters>;

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NoParameters {}

impl<T: DeserializeOwned> Query<T> {
    pub fn read(uri: &Uri) -> Result<Self, Problem> {
        Self::from_pairs(parse_pairs(uri)?)
    }

    /// Without the parameters whose value is empty, as a form sends its empty fields.
    pub fn read_form(uri: &Uri) -> Result<Self, Problem> {
        let mut pairs = parse_pairs(uri)?;
        pairs.retain(|(_, value)| !value.is_empty());
        Self::from_pairs(pairs)
    }

    fn from_pairs(pairs: Vec<(String, String)>) -> Result<Self, Problem> {
        for (at, (name, _)) in pairs.iter().enumerate() {
            if pairs[..at].iter().any(|(earlier, _)| earlier == name) {
                return Err(Problem::parameter(name, "is given twice"));
            }
        }
        let mut parameters = Parameters::group(pairs);
        let read = T::deserialize(MapAccessDeserializer::new(&mut parameters));
        read.map(Self).map_err(|error| parameters.problem(error))
    }
}

impl<T: DeserializeOwned, S: Sync> FromRequestParts<S> for Query<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        Self::read(&parts.uri)
    }
}

impl<T: JsonSchema> Input for Query<T> {
    fn describe(route: Route) -> Route {
        route.query::<T>()
    }
}

fn parse_pairs(uri: &Uri) -> Result<Vec<(String, String)>, Problem> {
    if uri.query().is_none_or(str::is_empty) {
        return Ok(Vec::new());
    }
    let malformed = |why: &str| Problem::new(ProblemCode::MalformedQuery, why);
    let axum::extract::Query(pairs) =
        axum::extract::Query::<Vec<(String, String)>>::try_from_uri(uri)
            .map_err(|rejection| malformed(&rejection.body_text()))?;
    if pairs.len() > MAX_PARAMETERS {
        let why = format!("the query has more than {MAX_PARAMETERS} parameters");
        return Err(malformed(&why));
    }
    let is_text = |text: &String| !text.contains('\u{fffd}');
    if !pairs
        .iter()
        .all(|(name, value)| is_text(name) && is_text(value))
    {
        return Err(malformed("the query is not percent-encoded UTF-8"));
    }
    Ok(pairs)
}

/// The parameters of a query as serde reads them.
struct Parameters {
    rest: std::vec::IntoIter<(String, Given)>,
    /// The parameter that is being read.
    current: Option<(String, Given)>,
}

enum Given {
    Text(String),
    /// The parameters with one prefix, without it.
    Group(Vec<(String, String)>),
}

impl Parameters {
    fn group(pairs: Vec<(String, String)>) -> Self {
        let mut fields: Vec<(String, Given)> = Vec::new();
        for (name, value) in pairs {
            let parts = name.split_once('.').filter(|(_, rest)| !rest.is_empty());
            let Some((prefix, rest)) = parts else {
                fields.push((name, Given::Text(value)));
                continue;
            };
            let (prefix, pair) = (format!("{prefix}."), (rest.to_owned(), value));
            let group = fields.iter_mut().find_map(|(name, given)| match given {
                Given::Group(pairs) if *name == prefix => Some(pairs),
                _ => None,
            });
            match group {
                Some(pairs) => pairs.push(pair),
                None => fields.push((prefix, Given::Group(vec![pair]))),
            }
        }
        Self {
            rest: fields.into_iter(),
            current: None,
        }
    }

    /// What is wrong with the parameter that was read last.
    fn problem(self, error: ReadError) -> Problem {
        let (name, given) = self
            .current
            .unwrap_or((String::new(), Given::Group(Vec::new())));
        match (error, given) {
            (ReadError::Value(why), Given::Text(text)) => {
                Problem::parameter(&name, format_args!("{} {why}", quote(&text)))
            }
            (ReadError::Value(why), Given::Group(_)) => Problem::parameter(&name, why),
            (ReadError::UnknownName(known), given) => {
                let name = match given {
                    Given::Group(pairs) => name + pairs.first().map_or("", |(rest, _)| rest),
                    Given::Text(_) => name,
                };
                Problem::new(
                    ProblemCode::UnknownParameter,
                    format!(
                        "unknown query parameter {}{}",
                        quote(&name),
                        did_you_mean(&name, known.iter().copied())
                    ),
                )
            }
        }
    }
}

/// Why a parameter cannot be read.
#[derive(Debug)]
enum ReadError {
    /// The end of a sentence about the value.
    Value(String),
    /// The route has only parameters of these names.
    UnknownName(&'static [&'static str]),
}

impl std::error::Error for ReadError {}

impl Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl de::Error for ReadError {
    fn custom<T: Display>(why: T) -> Self {
        Self::Value(why.to_string())
    }

    fn unknown_field(_: &str, known: &'static [&'static str]) -> Self {
        Self::UnknownName(known)
    }

    fn unknown_variant(_: &str, known: &'static [&'static str]) -> Self {
        Self::Value(format!("is not one of {}", known.join(", ")))
    }
}

impl<'de> MapAccess<'de> for Parameters {
    type Error = ReadError;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, ReadError> {
        let Some(next) = self.rest.next() else {
            return Ok(None);
        };
        let (name, _) = self.current.insert(next);
        seed.deserialize(name.as_str().into_deserializer())
            .map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, ReadError> {
        match &self.current {
            Some((_, given)) => seed.deserialize(given),
            None => Err(de::Error::custom("is missing")),
        }
    }
}

impl Given {
    fn text(&self) -> &str {
        match self {
            Self::Text(text) => text,
            Self::Group(_) => "",
        }
    }
}

impl<'de> Deserializer<'de> for &Given {
    type Error = ReadError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        match self {
            Given::Text(text) => visitor.visit_str(text),
            Given::Group(pairs) => {
                let pairs = pairs
                    .iter()
                    .map(|(name, value)| (name.as_str(), value.as_str()));
                visitor.visit_map(MapDeserializer::new(pairs))
            }
        }
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        match self {
            // A prefix without a name behind it.
            Given::Text(_) => Err(ReadError::UnknownName(&[])),
            Given::Group(_) => self.deserialize_any(visitor),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, ReadError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ReadError> {
        visitor.visit_enum(self.text().into_deserializer())
    }

    /// `true`, `false`, `1` or `0`; an empty value is true.
    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        match self.text() {
            "true" | "1" | "" => visitor.visit_bool(true),
            "false" | "0" => visitor.visit_bool(false),
            _ => Err(de::Error::custom("is not true or false")),
        }
    }

    fn deserialize_u32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        self.deserialize_u64(visitor)
    }

    fn deserialize_u64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        match self.text().parse() {
            Ok(number) => visitor.visit_u64(number),
            Err(_) => Err(de::Error::custom("is not a whole number, 0 or more")),
        }
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 u8 u16 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple tuple_struct struct
        identifier ignored_any
    }
}

/// The value of a parameter, if it is given; `expected` describes a valid one in the error.
pub fn parse<T>(
    name: &str,
    text: Option<&str>,
    expected: &str,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<Option<T>, Problem> {
    let Some(text) = text else {
        return Ok(None);
    };
    let invalid = || Problem::parameter(name, format_args!("{} is not {expected}", quote(text)));
    parse(text).map(Some).ok_or_else(invalid)
}

/// Reads a value from its text; `expected` describes a valid one in the error.
pub fn read_text<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    expected: impl Display,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<T, D::Error> {
    let text = String::deserialize(deserializer)?;
    parse(&text).ok_or_else(|| de::Error::custom(format_args!("is not {expected}")))
}

/// A number of entries from 1 to `MAX`.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Count<const MAX: usize, const DEFAULT: usize>(pub usize);

impl<const MAX: usize, const DEFAULT: usize> Default for Count<MAX, DEFAULT> {
    fn default() -> Self {
        Self(DEFAULT)
    }
}

impl<'de, const MAX: usize, const DEFAULT: usize> Deserialize<'de> for Count<MAX, DEFAULT> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected = format_args!("a number from 1 to {MAX}");
        let in_range = |text: &str| text.parse().ok().filter(|count| (1..=MAX).contains(count));
        read_text(deserializer, expected, in_range).map(Self)
    }
}

impl<const MAX: usize, const DEFAULT: usize> JsonSchema for Count<MAX, DEFAULT> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Count".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "integer", "minimum": 1, "maximum": MAX})
    }
}

/// The `next_cursor` of the previous page.
#[derive(Clone, Debug, JsonSchema)]
#[schemars(inline)]
pub struct Cursor<T>(#[schemars(with = "String")] pub T);

impl<'de, T: FromStr> Deserialize<'de> for Cursor<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        read_text(deserializer, "a cursor of this list", |text| {
            text.parse().ok()
        })
        .map(Self)
    }
}

/// The query of a list whose pages have one size.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PageQuery<T: FromStr> {
    pub cursor: Option<Cursor<T>>,
}

/// The id of a run, or a part of one.
#[derive(Clone, Debug, JsonSchema)]
#[schemars(inline)]
pub struct AnyRun(pub RunRef);

impl<'de> Deserialize<'de> for AnyRun {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        read_text(deserializer, "a run's id", |text| text.parse().ok()).map(Self)
    }
}

/// The id of a run by which a list is filtered: see [`path::run_id`].
pub async fn filtered_run(
    run: Option<&AnyRun>,
    principal: &Principal,
    state: &AppState,
) -> Result<Option<RunId>, Problem> {
    match run {
        Some(AnyRun(run)) => path::run_id(principal, state, run).await.map(Some),
        None => Ok(None),
    }
}

#[derive(Clone, Copy, Debug, JsonSchema)]
#[schemars(inline)]
pub struct Time(#[schemars(with = "Timestamp")] pub Timestamp);

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        read_text(deserializer, "an RFC 3339 time", parse_time).map(Self)
    }
}

/// What runs are searched for.
#[derive(Clone, Debug)]
pub struct TextSearch(pub SearchText);

impl<'de> Deserialize<'de> for TextSearch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected =
            format_args!("a text of at most {MAX_SEARCH_CHARS} characters that is not blank");
        read_text(deserializer, expected, SearchText::parse).map(Self)
    }
}

impl JsonSchema for TextSearch {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "TextSearch".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "minLength": 1, "maxLength": MAX_SEARCH_CHARS})
    }
}

/// An amount in US dollars.
#[derive(Clone, Copy, Debug)]
pub struct Usd(pub Cost);

impl Usd {
    pub fn parse(text: &str) -> Option<Self> {
        let usd: f64 = text.parse().ok()?;
        (usd.is_finite() && usd >= 0.0).then(|| Self(Cost::from_usd(usd)))
    }
}

impl<'de> Deserialize<'de> for Usd {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        read_text(deserializer, "an amount in US dollars", Self::parse)
    }
}

impl JsonSchema for Usd {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Usd".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "number", "minimum": 0})
    }
}

/// The name of a key of the configuration.
#[derive(Clone, Debug, JsonSchema)]
#[schemars(inline)]
pub struct KeyName(pub String);

impl<'de> Deserialize<'de> for KeyName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let key_name = |text: &str| is_valid_name(text).then(|| text.to_owned());
        read_text(deserializer, "a key's name", key_name).map(Self)
    }
}

/// The name of a session.
#[derive(Clone, Debug, JsonSchema)]
#[schemars(inline)]
pub struct SessionName(pub String);

impl FromStr for SessionName {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let name = is_agent_name(text).then(|| text.to_owned());
        name.map(Self).ok_or(())
    }
}

impl<'de> Deserialize<'de> for SessionName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        read_text(deserializer, "a session's name", |text| text.parse().ok())
    }
}

/// Labels by which runs are filtered: all must match.
#[derive(Clone, Debug, Default)]
pub struct Labels(pub Vec<(String, String)>);

impl<'de> Deserialize<'de> for Labels {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let labels = BTreeMap::<String, String>::deserialize(deserializer)?;
        match labels.len() {
            ..=MAX_LABELS => Ok(Self(labels.into_iter().collect())),
            count => {
                let why = format_args!("{count} labels are more than the maximum of {MAX_LABELS}");
                Err(de::Error::custom(why))
            }
        }
    }
}

/// Each property of this object is a query parameter: OpenAPI's way to describe parameters by prefix.
impl JsonSchema for Labels {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Labels".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "object",
            "propertyNames": {"pattern": "^label\\.."},
            "additionalProperties": {"type": "string"},
            "maxProperties": MAX_LABELS,
        })
    }
}

/// Conditions on the scores of runs, by name: all must match.
#[derive(Clone, Debug, Default)]
pub struct ScoreFilters(pub Vec<ScoreFilter>);

impl<'de> Deserialize<'de> for ScoreFilters {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let given = BTreeMap::<String, String>::deserialize(deserializer)?;
        let filters = given.into_iter().map(|(name, text)| {
            let parsed = ScoreCondition::parse(&text).filter(|_| is_score_name(&name));
            let condition = parsed.ok_or_else(|| {
                let (name, text) = (quote(&name), quote(&text));
                de::Error::custom(format_args!(
                    "{name}: {text} is not one of {}",
                    ScoreCondition::EXPECTED
                ))
            })?;
            Ok(ScoreFilter { name, condition })
        });
        let filters = filters.collect::<Result<Vec<_>, _>>()?;
        match filters.len() {
            ..=MAX_LABELS => Ok(Self(filters)),
            count => Err(de::Error::custom(format_args!(
                "{count} scores are more than the maximum of {MAX_LABELS}"
            ))),
        }
    }
}

impl JsonSchema for ScoreFilters {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "ScoreFilters".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "object",
            "propertyNames": {"pattern": "^score\\.."},
            "additionalProperties": {"type": "string"},
            "maxProperties": MAX_LABELS,
        })
    }
}

/// An RFC 3339 time. A `+` that was not percent-encoded arrives as a space.
pub fn parse_time(text: &str) -> Option<Timestamp> {
    bound(text).or_else(|| bound(&text.replace(' ', "+")))
}

/// A time. A time beyond the range of timestamps becomes the first or the last one, which is before or after every run.
fn bound(text: &str) -> Option<Timestamp> {
    if let Ok(time) = text.parse() {
        return Some(time);
    }
    let pieces = Pieces::parse(text).ok()?;
    pieces.time().and(pieces.to_numeric_offset())?;
    Some(match pieces.date().year() {
        9999 => Timestamp::MAX,
        -9999 => Timestamp::MIN,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use schemars::JsonSchema;
    use serde::Deserialize;

    use super::{Count, Labels, Query};
    use crate::domain::run::Status;

    #[derive(Debug, Default, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    struct Sample {
        status: Option<Status>,
        agent: Option<String>,
        full: bool,
        limit: Count<200, 50>,
        #[serde(rename = "label.")]
        labels: Labels,
    }

    fn read(query: &str) -> Result<Sample, String> {
        let uri = format!("/runs?{query}").parse().expect("a URI");
        Query::read(&uri)
            .map(|Query(sample)| sample)
            .map_err(|problem| String::from_utf8_lossy(&problem.render("", "")).into_owned())
    }

    #[test]
    fn parameters_are_read() {
        let query =
            read("agent=a%20b&label.team=x&status=failed&label.a.b=&full").expect("a query");
        assert_eq!(query.agent.as_deref(), Some("a b"));
        assert_eq!(query.status, Some(Status::Failed));
        assert_eq!(query.labels.0.len(), 2);
        assert_eq!(query.labels.0[0], ("a.b".to_owned(), String::new()));
        assert!(query.full);
        let query = read("").expect("a query");
        assert!(query.agent.is_none() && !query.full && query.limit.0 == 50);
    }

    #[test]
    fn an_invalid_parameter_is_named() {
        let labels = |count: usize| {
            let labels: Vec<String> = (0..count).map(|n| format!("label.{n}=x")).collect();
            labels.join("&")
        };
        let (many, too_many) = (labels(65), labels(201));
        for (query, expected) in [
            (
                "statsu=a",
                r#"unknown query parameter \"statsu\"; did you mean \"status\"?"#,
            ),
            ("label.=a", r#"unknown query parameter \"label.\"","#),
            ("team.a=a", r#"unknown query parameter \"team.a\"","#),
            ("limit=1&limit=2", r#"\"limit\": is given twice"#),
            ("label.a=1&label.a=2", r#"\"label.a\": is given twice"#),
            ("status=%ff", "not percent-encoded UTF-8"),
            (
                "limit=0",
                r#"\"limit\": \"0\" is not a number from 1 to 200"#,
            ),
            ("full=yes", r#"\"full\": \"yes\" is not true or false"#),
            (
                "status=gone",
                r#"\"status\": \"gone\" is not one of queued,"#,
            ),
            (&many, r#"\"label.\": 65 labels are more than"#),
            (&too_many, "more than 200 parameters"),
        ] {
            let error = read(query).expect_err(query);
            assert!(error.contains(expected), "{error}");
        }
    }
}
