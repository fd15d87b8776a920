//! Waiting for a run: `?wait=30`, `?wait=30s`, `Prefer: wait=30` (RFC 7240).

use std::sync::Arc;
use std::time::Duration;

use axum::http::HeaderMap;
use axum::http::header::HeaderName;
use tracing::warn;

use crate::domain::run::Run;
use crate::web::error::{Problem, word};
use crate::web::query::Query;
use crate::web::state::AppState;

const PREFER: HeaderName = HeaderName::from_static("prefer");

/// How long the caller wants to wait; zero where it says nothing. The query wins over the header, and no wish goes
/// beyond `most`.
pub fn asked(query: &Query, headers: &HeaderMap, most: Duration) -> Result<Duration, Problem> {
    let (name, text) = match query.get("wait") {
        Some(text) => ("wait", text),
        None => match preference(headers) {
            Some(text) => ("Prefer", text),
            None => return Ok(Duration::ZERO),
        },
    };
    seconds(text).map(|wish| wish.min(most)).ok_or_else(|| {
        let why = format_args!("{} is no time to wait; say 30 or 30s", word(text));
        Problem::parameter(name, why)
    })
}

/// The run once it is terminal, or as it stands when the time is over or the daemon closes. A run that is already
/// accepted is never an error here: its caller would start it a second time.
pub async fn settled(state: &AppState, run: Arc<Run>, limit: Duration) -> Arc<Run> {
    if limit.is_zero() || run.status.is_terminal() {
        return run;
    }
    let found = tokio::select! {
        biased;
        found = state.runner.wait(run.id, limit) => found,
        () = state.closing.cancelled() => state.runner.store().run(run.id).await.map(|run| run.map(Arc::new)),
    };
    match found {
        Ok(found) => found.unwrap_or(run),
        Err(error) => {
            warn!(
                run.id = %run.id, run.root = %run.root_id, agent = %run.agent, depth = run.depth.0,
                "Could not wait for {}, answering with the run as it was: {error}", run.id
            );
            run
        }
    }
}

/// The `wait` preference.
fn preference(headers: &HeaderMap) -> Option<&str> {
    headers
        .get_all(PREFER)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split([',', ';']))
        .filter_map(|preference| preference.split_once('='))
        .find(|(name, _)| name.trim().eq_ignore_ascii_case("wait"))
        .map(|(_, value)| value.trim().trim_matches('"'))
}

/// Whole or broken seconds, with or without an `s`. Only digits and a point: no sign, no `nan`, no exponent.
fn seconds(text: &str) -> Option<Duration> {
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

    use super::{asked, seconds};
    use crate::web::query::Query;

    #[test]
    fn times_are_seconds() {
        assert_eq!(seconds("30"), Some(Duration::from_secs(30)));
        assert_eq!(seconds("30s"), Some(Duration::from_secs(30)));
        assert_eq!(seconds("0.5"), Some(Duration::from_millis(500)));
        assert_eq!(seconds(&"9".repeat(400)), Some(Duration::MAX));
        for bad in [
            "", "s", "-1", "1e3", "nan", "inf", "+1", "1m", ".", "1..2", " 1",
        ] {
            assert_eq!(seconds(bad), None, "{bad}");
        }
    }

    #[test]
    fn the_query_wins_and_the_server_limits() {
        let most = Duration::from_secs(60);
        let mut headers = HeaderMap::new();
        let none = Query::default();
        assert_eq!(asked(&none, &headers, most).ok(), Some(Duration::ZERO));
        headers.insert("prefer", "respond-async, wait=5".parse().expect("a value"));
        assert_eq!(
            asked(&none, &headers, most).ok(),
            Some(Duration::from_secs(5))
        );
        let uri = "/?wait=1000".parse().expect("a URI");
        let query = Query::read(&uri, &["wait"]).expect("a query");
        assert_eq!(asked(&query, &headers, most).ok(), Some(most));
        headers.insert("prefer", "wait=soon".parse().expect("a value"));
        let problem = asked(&none, &headers, most).expect_err("no time");
        let body = String::from_utf8_lossy(&problem.render("", "")).into_owned();
        assert!(body.contains("Prefer"), "{body}");
    }
}
