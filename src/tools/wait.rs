//! `sleep` and `wait_for`: wait for a time, or for an event of the world outside.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use futures_util::future::BoxFuture;
use jiff::{SignedDuration, Timestamp};
use schemars::JsonSchema;
use serde::Deserialize;

use crate::domain::json_schema::Schema;
use crate::domain::message::{ToolCall, ToolSpec};
use crate::domain::run::now;
use crate::domain::world_event::{self, WaitedEvent};
use crate::tools::{CallContext, Effect, StaticSpec, Tool, ToolOutput, WaitRequest};

pub const SLEEP: &str = "sleep";
pub const WAIT_FOR: &str = "wait_for";

const SLEEP_DESCRIPTION: &str =
    "Do nothing for a time, or until a time, and then go on with the task. Waiting costs nothing.";
const WAIT_FOR_DESCRIPTION: &str = "Wait until something happens in the world outside, such as a payment or the end of a build, and get \
                                 what is known of it. The task or the instructions say which events there are. Waiting costs nothing.";

static SLEEP_SPEC: LazyLock<StaticSpec> =
    LazyLock::new(|| StaticSpec::new::<SleepArguments>(SLEEP, SLEEP_DESCRIPTION));
static WAIT_FOR_SPEC: LazyLock<StaticSpec> =
    LazyLock::new(|| StaticSpec::new::<WaitForArguments>(WAIT_FOR, WAIT_FOR_DESCRIPTION));

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SleepArguments {
    /// For how many seconds.
    #[serde(default)]
    #[schemars(range(min = 0))]
    seconds: Option<f64>,
    /// Until when, such as 2026-03-01T09:30:00Z; instead of `seconds`.
    #[serde(default)]
    until: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct WaitForArguments {
    /// The name of the event.
    #[schemars(length(min = 1, max = 100))]
    event: String,
    /// What the event is about, such as the number of an order.
    #[schemars(length(min = 1, max = 200))]
    key: String,
    /// After how many seconds to give up.
    #[serde(default)]
    #[schemars(range(min = 1))]
    timeout: Option<f64>,
}

struct Sleep {
    max: Duration,
}

struct WaitFor {
    max: Duration,
}

/// The tools of an agent whose calls wait so long at most.
pub fn tools(max: Duration) -> [(&'static str, Arc<dyn Tool>); 2] {
    [
        (SLEEP, Arc::new(Sleep { max })),
        (WAIT_FOR, Arc::new(WaitFor { max })),
    ]
}

impl Tool for Sleep {
    fn spec(&self) -> ToolSpec {
        SLEEP_SPEC.to_spec()
    }

    fn effect(&self) -> Effect {
        Effect::Asking
    }

    fn schema(&self) -> Option<&Schema> {
        SLEEP_SPEC.schema.as_ref()
    }

    fn call<'a>(
        &'a self,
        call: &'a ToolCall,
        context: CallContext<'a>,
    ) -> BoxFuture<'a, Result<ToolOutput, String>> {
        Box::pin(async move {
            let arguments: SleepArguments = call.parse_arguments()?;
            // A call that has begun before a restart has its end in the record.
            let begun = context.delegate.wait_began(&call.id);
            let start = begun.unwrap_or_else(now);
            let limit = match (arguments.seconds, &arguments.until) {
                (Some(seconds), None) => duration("seconds", seconds)?,
                (None, Some(until)) => {
                    let until: Timestamp = until.parse().map_err(|_| {
                        "until must be a time such as 2026-03-01T09:30:00Z".to_owned()
                    })?;
                    Duration::try_from(start.duration_until(until)).unwrap_or_default()
                }
                _ => return Err("give either seconds or until".to_owned()),
            };
            check_max(limit, self.max)?;
            if limit.is_zero() {
                return Ok(ToolOutput::from("This time is past already.".to_owned()));
            }
            let request = WaitRequest {
                call: call.id.clone(),
                event: None,
                limit,
            };
            context.delegate.wait(request).await?;
            Ok(ToolOutput::from(format!("It is {} now.", now())))
        })
    }
}

impl Tool for WaitFor {
    fn spec(&self) -> ToolSpec {
        WAIT_FOR_SPEC.to_spec()
    }

    fn effect(&self) -> Effect {
        Effect::Asking
    }

    fn schema(&self) -> Option<&Schema> {
        WAIT_FOR_SPEC.schema.as_ref()
    }

    fn call<'a>(
        &'a self,
        call: &'a ToolCall,
        context: CallContext<'a>,
    ) -> BoxFuture<'a, Result<ToolOutput, String>> {
        Box::pin(async move {
            let WaitForArguments {
                event,
                key,
                timeout,
            } = call.parse_arguments()?;
            world_event::check_name(&event).map_err(|why| format!("event {why}"))?;
            world_event::check_key(&key).map_err(|why| format!("key {why}"))?;
            let limit = match timeout {
                Some(seconds) => duration("timeout", seconds)?,
                None => self.max,
            };
            check_max(limit, self.max)?;
            let what = format!("{event} {key}");
            let request = WaitRequest {
                call: call.id.clone(),
                event: Some(WaitedEvent { event, key }),
                limit,
            };
            match context.delegate.wait(request).await? {
                Some(data) => Ok(ToolOutput::from(data.get().to_owned())),
                None => Err(format!("{what} did not come within {}s", limit.as_secs())),
            }
        })
    }
}

fn duration(name: &str, seconds: f64) -> Result<Duration, String> {
    let rounded = SignedDuration::try_from_secs_f64(seconds).ok();
    let duration = rounded.and_then(|it| Duration::try_from(it).ok());
    duration.ok_or_else(|| format!("{name} must be a number of seconds, at least 0"))
}

fn check_max(limit: Duration, max: Duration) -> Result<(), String> {
    match limit > max {
        true => Err(format!("a wait may take at most {} seconds", max.as_secs())),
        false => Ok(()),
    }
}
