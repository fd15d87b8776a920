//! What a request set besides its input, its earlier messages, its session and its labels, as the run's first event records
//! it: in the shape of the request's body, so that a client can send it again.

use std::sync::Arc;

use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value};

use crate::domain::agent::Budget;
use crate::domain::agent::overrides::ParamsOverride;
use crate::domain::agent::response_format::ResponseFormat;
use crate::engine::request::{Overrides, RunRequest};

/// Most bytes of a recorded request. Instead of a larger one, `{"too_large": true}` is recorded.
const MAX_BYTES: usize = 64 << 10;
/// No field of a request.
const TOO_LARGE: &str = "too_large";

/// `None` if the request set nothing. Leaves out webhooks and provider keys, which may be secrets, and what a client of another
/// protocol adds, which is in the run's definition.
pub fn recorded_request(request: &RunRequest) -> Option<Arc<RawValue>> {
    merged(&Map::new(), request)
}

/// The same with the fields of an earlier request that this one does not set.
pub fn merged(earlier: &Map<String, Value>, request: &RunRequest) -> Option<Arc<RawValue>> {
    let Overrides {
        model,
        skill,
        workdir,
        params,
        timeout,
        budget,
        priority,
        client: _,
    } = &request.overrides;
    let mut fields = Fields(earlier.clone());
    fields.set("context", request.context.as_ref());
    fields.set("model", model.as_ref());
    fields.set("skill", skill.as_ref());
    fields.set("workdir", workdir.as_ref());
    fields.set("params", param_fields(params).non_empty().as_ref());
    fields.set("timeout", timeout.map(|timeout| timeout.as_secs()).as_ref());
    fields.set("budget", budget_fields(budget).non_empty().as_ref());
    fields.set("priority", priority.as_ref());
    fields.set("stream", request.stream.as_ref());
    let json = to_raw_value(&fields.non_empty()?).ok()?;
    if json.get().len() > MAX_BYTES {
        let marker = to_raw_value(&serde_json::json!({ TOO_LARGE: true })).ok()?;
        return Some(Arc::from(marker));
    }
    Some(Arc::from(json))
}

/// Whether this is what is recorded instead of a request that is too large.
pub fn is_too_large(recorded: &Map<String, Value>) -> bool {
    recorded.contains_key(TOO_LARGE)
}

fn param_fields(params: &ParamsOverride<ResponseFormat>) -> Fields {
    let ParamsOverride {
        temperature,
        max_tokens,
        top_p,
        stop,
        response_format,
        effort,
        service,
        extra,
    } = params;
    let mut fields = Fields::default();
    fields.set("temperature", temperature.as_ref());
    fields.set("max_tokens", max_tokens.as_ref());
    fields.set("top_p", top_p.as_ref());
    fields.set("stop", stop.as_ref());
    fields.set("response_format", response_format.as_ref());
    fields.set("effort", effort.as_ref());
    fields.set("service", service.as_ref());
    fields.set("extra", extra.as_ref());
    fields
}

fn budget_fields(budget: &Budget) -> Fields {
    let Budget {
        max_tokens,
        max_cost,
        max_tool_calls,
        max_runs,
    } = budget;
    let mut fields = Fields::default();
    fields.set("max_tokens", max_tokens.as_ref());
    fields.set("max_cost_usd", max_cost.map(|cost| cost.to_usd()).as_ref());
    fields.set("max_tool_calls", max_tool_calls.as_ref());
    fields.set("max_runs", max_runs.as_ref());
    fields
}

#[derive(Default)]
struct Fields(Map<String, Value>);

impl Fields {
    fn set(&mut self, key: &str, value: Option<&impl Serialize>) {
        let json = value.and_then(|value| serde_json::to_value(value).ok());
        if let Some(json) = json {
            self.0.insert(key.to_owned(), json);
        }
    }

    fn non_empty(self) -> Option<Map<String, Value>> {
        Some(self.0).filter(|fields| !fields.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::recorded_request;
    use crate::domain::agent::Budget;
    use crate::domain::agent::overrides::ParamsOverride;
    use crate::domain::agent::response_format::ResponseFormat;
    use crate::engine::request::{Overrides, RunRequest};

    #[test]
    fn what_a_request_sets_is_recorded_as_in_its_body() {
        assert!(recorded_request(&RunRequest::default()).is_none());
        let request = RunRequest {
            context: Some("earlier".to_owned()),
            overrides: Overrides {
                model: Some("x/y".to_owned()),
                params: ParamsOverride {
                    temperature: Some(0.0),
                    response_format: Some(ResponseFormat::JsonObject),
                    ..ParamsOverride::default()
                },
                timeout: Some(Duration::from_secs(7)),
                budget: Budget {
                    max_runs: Some(3),
                    ..Budget::default()
                },
                ..Overrides::default()
            },
            ..RunRequest::default()
        };
        let recorded = recorded_request(&request).expect("a request");
        let recorded: serde_json::Value = serde_json::from_str(recorded.get()).expect("JSON");
        assert_eq!(
            recorded,
            json!({
                "context": "earlier", "model": "x/y", "timeout": 7, "budget": {"max_runs": 3},
                "params": {"temperature": 0.0, "response_format": {"type": "json_object"}},
            })
        );
        let large = RunRequest {
            context: Some("x".repeat(70_000)),
            ..RunRequest::default()
        };
        let recorded = recorded_request(&large).expect("a marker");
        assert_eq!(recorded.get(), r#"{"too_large":true}"#);
    }
}
