//! Waits for a run: `?wait=30`, `?wait=30s`, `Prefer: wait=30` (RFC 7240).

use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use axum::extract::FromRequestParts;
use axum::http::HeaderMap;
use axum::http::header::HeaderName;
use axum::http::request::Parts;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer};
use serde_json::json;
use tracing::warn;

use crate::domain::run::Run;
use crate::store::StoreError;
use crate::web::error::{Problem, quote};
use crate::web::extract::query::read_text;
use crate::web::route::{Input, Route};
use crate::web::state::AppState;

const PREFER: HeaderName = HeaderName::from_static("prefer");
const EXPECTED: &str = "a wait: use seconds, such as 30 or 30s";

/// The query of a route that can wait and has no other parameters.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct WaitQuery {
    /// Seconds to wait for the end, at most `server.max_wait`. A run that comes to wait for a person is returned at once.
    pub wait: Option<Seconds>,
}

/// Seconds, such as `30` or `30s`.
#[derive(Clone, Copy, Debug, JsonSchema)]
#[schemars(inline)]
pub struct Seconds(
    #[schemars(
        with = "String",
        regex(pattern = r"^[0-9]*\.?[0-9]*s?$"),
        example = "30",
        example = "30s"
    )]
    Duration,
);

impl Seconds {
    pub fn duration(self) -> Duration {
        self.0
    }
}

impl<'de> Deserialize<'de> for Seconds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        read_text(deserializer, EXPECTED, parse_seconds).map(Self)
    }
}

/// The wait that `Prefer` names. The query wins over it.
pub struct Prefer(Option<Box<str>>);

impl Prefer {
    pub fn read(headers: &HeaderMap) -> Self {
        Self(wait_preference(headers).map(Into::into))
    }

    /// How long the client wants to wait, at most `max_wait`; zero if neither the query nor the header has it.
    pub fn timeout(self, query: Option<Seconds>, max_wait: Duration) -> Result<Duration, Problem> {
        let wait = match (query, self.0) {
            (Some(Seconds(wait)), _) => wait,
            (None, None) => Duration::ZERO,
            (None, Some(text)) => parse_seconds(&text).ok_or_else(|| {
                Problem::parameter("Prefer", format_args!("{} is not {EXPECTED}", quote(&text)))
            })?,
        };
        Ok(wait.min(max_wait))
    }
}

impl Input for Prefer {
    fn describe(route: Route) -> Route {
        route.header(
            "Prefer",
            json!({"type": "string", "examples": ["wait=30"]}),
            "The same as `wait` (RFC 7240); `wait` in the query wins.",
        )
    }
}

impl<S: Sync> FromRequestParts<S> for Prefer {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self::read(&parts.headers))
    }
}

/// The run once it is terminal, or its current state when the time is over or the daemon shuts down. Never an error:
/// the run is accepted, and a client that gets an error would start it a second time.
pub async fn wait_for_end(state: &AppState, run: Arc<Run>, timeout: Duration) -> Arc<Run> {
    if timeout.is_zero() || run.status.is_terminal() {
        return run;
    }
    let outcome = pin!(state.runner.wait(run.id, timeout));
    until_closing(state, &run, outcome).await
}

/// Like [`wait_for_end`], but also returns when the run comes to wait for a person. If `run` waits for one already, that is
/// when it waits no more, or for other calls.
pub async fn wait_for_end_or_person(
    state: &AppState,
    run: Arc<Run>,
    timeout: Duration,
) -> Arc<Run> {
    if timeout.is_zero() || run.status.is_terminal() {
        return run;
    }
    let seen = run.waits_for_person().then_some(&*run);
    let outcome = pin!(state.runner.wait_for_end_or_person(run.id, seen, timeout));
    until_closing(state, &run, outcome).await
}

/// `outcome` is pinned where it was made: a future that it is moved into has space for it twice.
async fn until_closing(
    state: &AppState,
    run: &Arc<Run>,
    outcome: Pin<&mut impl Future<Output = Result<Option<Arc<Run>>, StoreError>>>,
) -> Arc<Run> {
    let outcome = tokio::select! {
        biased;
        found = outcome => found,
        () = state.closing.cancelled() => state.runner.run(run.id).await.map(|run| run.map(Arc::new)),
    };
    match outcome {
        Ok(current) => current.unwrap_or_else(|| Arc::clone(run)),
        Err(error) => {
            warn!(
                run.id = %run.id, run.root = %run.root_id, agent = %run.agent, depth = run.depth.0,
                "Cannot wait for {}, responding with its earlier state: {error}", run.id
            );
            Arc::clone(run)
        }
    }
}

fn wait_preference(headers: &HeaderMap) -> Option<&str> {
    headers
        .get_all(PREFER)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split([',', ';']))
        .filter_map(|preference| preference.split_once('='))
        .find(|(name, _)| name.trim().eq_ignore_ascii_case("wait"))
        .map(|(_, value)| value.trim().trim_matches('"'))
}

/// Seconds, possibly with a fraction and a final `s`. Only digits and a point: no sign, no `nan`, no exponent.
fn parse_seconds(text: &str) -> Option<Duration> {
    let number = text.strip_suffix('s').unwrap_or(text);
    if number.is_empty() || !number.bytes().all(|b| b.is_ascii_digit() || b == b'.') {
        return None;
    }
    let seconds: f64 = number.parse().ok()?;
    Some(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use axum::http::HeaderMap;

    use super::{Prefer, WaitQuery, parse_seconds};
    use crate::web::extract::query::Query;

    #[test]
    fn waits_are_seconds() {
        assert_eq!(parse_seconds("30"), Some(Duration::from_secs(30)));
        assert_eq!(parse_seconds("30s"), Some(Duration::from_secs(30)));
        assert_eq!(parse_seconds("0.5"), Some(Duration::from_millis(500)));
        assert_eq!(parse_seconds(&"9".repeat(400)), Some(Duration::MAX));
        for bad in [
            "", "s", "-1", "1e3", "nan", "inf", "+1", "1m", ".", "1..2", " 1",
        ] {
            assert_eq!(parse_seconds(bad), None, "{bad}");
        }
    }

    #[test]
    fn the_query_wins_and_max_wait_limits() {
        let max_wait = Duration::from_secs(60);
        let mut headers = HeaderMap::new();
        let timeout = |headers: &HeaderMap, query| Prefer::read(headers).timeout(query, max_wait);
        assert_eq!(timeout(&headers, None).ok(), Some(Duration::ZERO));
        headers.insert("prefer", "respond-async, wait=5".parse().expect("a value"));
        assert_eq!(timeout(&headers, None).ok(), Some(Duration::from_secs(5)));
        let uri = "/?wait=1000".parse().expect("a URI");
        let Query(WaitQuery { wait }) = Query::read(&uri).expect("a query");
        assert_eq!(timeout(&headers, wait).ok(), Some(max_wait));
        headers.insert("prefer", "wait=soon".parse().expect("a value"));
        let problem = timeout(&headers, None).expect_err("an invalid wait");
        let body = String::from_utf8_lossy(&problem.render("", "")).into_owned();
        assert!(body.contains("Prefer"), "{body}");
    }
}
