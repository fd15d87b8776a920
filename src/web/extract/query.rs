//! Query parameters: each is checked, and an error names the parameter that is wrong.

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{StatusCode, Uri};

use crate::web::error::{Problem, did_you_mean, quote};
use crate::web::problem_code::ProblemCode;

/// Maximum parameters of a query: each is compared with all before it.
const MAX_PARAMETERS: usize = 200;

/// A request's query parameters.
#[derive(Debug, Default)]
pub struct Query(Vec<(String, String)>);

impl Query {
    /// Reads the parameters. A name that is not in `allowed` is refused, because a mistyped filter would show everything.
    /// An allowed name that ends in a dot allows all names with that prefix.
    pub fn read(uri: &Uri, allowed: &[&str]) -> Result<Self, Problem> {
        let query = Self::parse_pairs(uri)?;
        let pairs = &query.0;
        for (at, (name, _)) in pairs.iter().enumerate() {
            let is_allowed = |known: &&str| match known.strip_suffix('.') {
                Some(_) => name.len() > known.len() && name.starts_with(*known),
                None => *known == name,
            };
            if !allowed.iter().any(is_allowed) {
                return Err(Problem::new(
                    StatusCode::BAD_REQUEST,
                    ProblemCode::UnknownParameter,
                    format!(
                        "unknown query parameter {}{}",
                        quote(name),
                        did_you_mean(name, allowed.iter().copied())
                    ),
                ));
            }
            if pairs[..at].iter().any(|(earlier, _)| earlier == name) {
                return Err(Problem::parameter(name, "is given twice"));
            }
        }
        Ok(query)
    }

    /// Reads the parameters of these names, and passes over others, which clients of other services send.
    pub fn read_known(uri: &Uri, known: &[&str]) -> Result<Self, Problem> {
        let mut query = Self::parse_pairs(uri)?;
        query.0.retain(|(name, _)| known.contains(&name.as_str()));
        Ok(query)
    }

    fn parse_pairs(uri: &Uri) -> Result<Self, Problem> {
        if uri.query().is_none_or(str::is_empty) {
            return Ok(Self::default());
        }
        let malformed = |why: &str| {
            Problem::new(
                StatusCode::BAD_REQUEST,
                ProblemCode::MalformedQuery,
                why.to_owned(),
            )
        };
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
        Ok(Self(pairs))
    }

    /// Without the parameters whose value is empty.
    pub fn without_empty(mut self) -> Self {
        self.0.retain(|(_, value)| !value.is_empty());
        self
    }

    pub fn get(&self, name: &str) -> Option<&str> {
        self.0
            .iter()
            .find(|(known, _)| known == name)
            .map(|(_, value)| value.as_str())
    }

    /// The value of one parameter, parsed; `expected` describes a valid value in the error.
    pub fn parse<T>(
        &self,
        name: &str,
        expected: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, Problem> {
        let Some(text) = self.get(name) else {
            return Ok(None);
        };
        match parse(text) {
            Some(value) => Ok(Some(value)),
            None => Err(Problem::parameter(
                name,
                format_args!("{} is not {expected}", quote(text)),
            )),
        }
    }

    /// The parameters with this prefix, without the prefix.
    pub fn with_prefix(&self, prefix: &str) -> Vec<(String, String)> {
        self.0
            .iter()
            .filter_map(|(name, value)| {
                Some((name.strip_prefix(prefix)?.to_owned(), value.clone()))
            })
            .collect()
    }
}

/// A request of a route that has no query parameters: any parameter is refused.
pub struct NoQuery;

impl<S: Send + Sync> FromRequestParts<S> for NoQuery {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        Query::read(&parts.uri, &[]).map(|_| Self)
    }
}

/// `true`, `false`, `1` or `0`; an empty value is true.
pub fn parse_flag(text: &str) -> Option<bool> {
    match text {
        "true" | "1" | "" => Some(true),
        "false" | "0" => Some(false),
        _ => None,
    }
}

/// A number from 1 to `max`.
pub fn count_up_to(max: usize) -> impl FnOnce(&str) -> Option<usize> {
    move |text| text.parse().ok().filter(|count| (1..=max).contains(count))
}

#[cfg(test)]
mod tests {
    use super::{Query, count_up_to};

    fn read(query: &str) -> Result<Query, String> {
        let uri = format!("/runs?{query}").parse().expect("a URI");
        Query::read(&uri, &["status", "limit", "label."])
            .map_err(|problem| String::from_utf8_lossy(&problem.render("", "")).into_owned())
    }

    #[test]
    fn parameters_are_read() {
        let query = read("status=a%20b&label.team=x&label.a.b=").expect("a query");
        assert_eq!(query.get("status"), Some("a b"));
        let labels = query.with_prefix("label.");
        assert_eq!(labels.len(), 2);
        assert_eq!(labels[1], ("a.b".to_owned(), String::new()));
        assert!(read("").expect("a query").get("status").is_none());
    }

    #[test]
    fn an_invalid_parameter_is_named() {
        let labels: Vec<String> = (0..201).map(|n| format!("label.{n}=x")).collect();
        let many = labels.join("&");
        for (query, expected) in [
            (
                "statsu=a",
                r#"unknown query parameter \"statsu\"; did you mean \"status\"?"#,
            ),
            ("label.=a", r#"unknown query parameter \"label.\"","#),
            ("limit=1&limit=2", r#"\"limit\": is given twice"#),
            ("status=%ff", "not percent-encoded UTF-8"),
            (&many, "more than 200 parameters"),
        ] {
            let error = read(query).expect_err(query);
            assert!(error.contains(expected), "{error}");
        }
        let error = read("limit=0")
            .expect("a query")
            .parse("limit", "a number from 1 to 200", count_up_to(200))
            .expect_err("no limit");
        let body = String::from_utf8_lossy(&error.render("", "")).into_owned();
        assert!(
            body.contains(r#"\"limit\": \"0\" is not a number from 1 to 200"#),
            "{body}"
        );
    }
}
