//! Validates JSON against schemas, both of which clients, models or MCP servers choose. Small checks run inline; others run on
//! a few threads of their own, so that they do not block the runtime. Each check ends within seconds.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock};
use std::thread;

use serde_json::Value;
use serde_json::value::RawValue;
use tokio::sync::oneshot;

use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::json_schema::Schema;
use crate::domain::json_schema::compiled::Mismatch;
use crate::domain::json_schema::limits::STACK_BYTES;
use crate::domain::structured::{self, FinalText};
use crate::fair::fair_semaphore::FairSemaphore;

/// Larger JSON is not parsed on a thread of the runtime.
const MAX_INLINE_BYTES: usize = 256 << 10;

/// Limits the threads that validate at the same time, so that the runtime keeps the other processors. Fair between keys.
static THREAD_PERMITS: LazyLock<FairSemaphore> = LazyLock::new(|| {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    FairSemaphore::new((processors / 2).clamp(1, 8), &[])
});

/// The schema, checked. `owner` is the key that sent it.
///
/// # Errors
/// Why it is not a valid schema.
pub async fn compile_schema(raw: Arc<RawValue>, owner: Option<&str>) -> Result<Schema, String> {
    let schema = Schema::parse(raw)?;
    let checked = match schema.compile_inline() {
        Some(checked) => checked,
        None => {
            let raw = Arc::clone(schema.raw());
            run_on_thread(owner, move || Schema::parse(raw)?.compile()).await?
        }
    };
    checked.map(|()| schema)
}

/// As [`compile_schema`], for callers that may block.
pub fn compile_schema_blocking(raw: Arc<RawValue>) -> Result<Schema, String> {
    let schema = Schema::parse(raw)?;
    let checked = match schema.compile_inline() {
        Some(checked) => checked,
        None => run_on_scoped_thread(|| schema.compile())?,
    };
    checked.map(|()| schema)
}

/// The arguments, coerced to the schema; see [`Schema::coerce`]. `owner` is the key of the run.
///
/// # Errors
/// One sentence for each mismatch.
pub async fn check_arguments(
    schema: &Schema,
    json: &Arc<RawValue>,
    owner: Option<&str>,
) -> Result<Value, Vec<String>> {
    if let Some(checked) = check_arguments_inline(schema, json) {
        return checked;
    }
    let (raw, json) = (Arc::clone(schema.raw()), Arc::clone(json));
    let checked = run_on_thread(owner, move || {
        let schema = Schema::parse(raw).map_err(|why| vec![why])?;
        schema.coerce(parse_json(&json)?)
    });
    checked.await.unwrap_or_else(|why| Err(vec![why]))
}

/// Checks a value against a schema, without coercion. `owner` is the key that sent the value.
///
/// # Errors
/// Each mismatch.
pub async fn check_value(
    schema: Schema,
    value: Value,
    owner: Option<&str>,
) -> Result<Value, Vec<Mismatch>> {
    let mismatches = match schema.mismatches_inline(&value) {
        Some(mismatches) => Ok((value, mismatches)),
        None => {
            let check = move || {
                let mismatches = schema.mismatches(&value);
                (value, mismatches)
            };
            run_on_thread(owner, check).await
        }
    };
    match mismatches {
        Ok((value, mismatches)) if mismatches.is_empty() => Ok(value),
        Ok((_, mismatches)) => Err(mismatches),
        Err(why) => Err(vec![Mismatch::of_whole(why)]),
    }
}

/// As [`check_value`], of JSON that is not parsed.
pub async fn check_raw_value(
    schema: &Schema,
    json: &RawValue,
    owner: Option<&str>,
) -> Result<(), Vec<Mismatch>> {
    let whole = |why: String| vec![Mismatch::of_whole(why)];
    let schema = Schema::parse(Arc::clone(schema.raw())).map_err(whole)?;
    let value = parse_json(json).map_err(|errors| whole(errors.join("; ")))?;
    check_value(schema, value, owner).await.map(drop)
}

/// As [`check_value`], for callers that may block.
pub fn check_value_blocking(raw: Arc<RawValue>, value: &Value) -> Result<(), Vec<Mismatch>> {
    let whole = |why: String| vec![Mismatch::of_whole(why)];
    let schema = Schema::parse(raw).map_err(whole)?;
    let mismatches = match schema.mismatches_inline(value) {
        Some(mismatches) => mismatches,
        None => run_on_scoped_thread(|| schema.mismatches(value)).map_err(whole)?,
    };
    match mismatches.is_empty() {
        true => Ok(()),
        false => Err(mismatches),
    }
}

/// As [`check_arguments`]; `None` if the check needs a thread of its own.
pub fn check_arguments_inline(
    schema: &Schema,
    json: &RawValue,
) -> Option<Result<Value, Vec<String>>> {
    if json.get().len() > MAX_INLINE_BYTES {
        return None;
    }
    match parse_json(json) {
        Ok(value) => schema.coerce_inline(value).ok(),
        Err(errors) => Some(Err(errors)),
    }
}

/// As [`check_output`]; `None` if the check needs a thread of its own.
pub fn check_output_inline(
    format: &ResponseFormat,
    text: &str,
) -> Option<Result<FinalText, Vec<String>>> {
    match format {
        ResponseFormat::Text => Some(Ok(FinalText::Free)),
        _ if text.len() > MAX_INLINE_BYTES => None,
        _ => structured::check_inline(format, text),
    }
}

/// Checks a final text against the requested format. `owner` is the key of the run.
///
/// # Errors
/// One sentence for each mismatch.
pub async fn check_output(
    format: &ResponseFormat,
    text: &str,
    owner: Option<&str>,
) -> Result<FinalText, Vec<String>> {
    if let Some(checked) = check_output_inline(format, text) {
        return checked;
    }
    let (format, text) = (format.clone(), text.to_owned());
    let checked = run_on_thread(owner, move || structured::check(&format, &text)).await;
    checked.unwrap_or_else(|why| Err(vec![why]))
}

/// Raw JSON can fail to parse: numbers that are too large, half of a surrogate pair, too many levels.
fn parse_json(json: &RawValue) -> Result<Value, Vec<String>> {
    serde_json::from_str(json.get()).map_err(|error| vec![format!("they cannot be read: {error}")])
}

/// Runs `work`, which limits its own time, on a thread with a large stack, when `owner` gets a permit. If the caller is
/// dropped, the work continues and keeps its permit until it ends.
async fn run_on_thread<T: Send + 'static>(
    owner: Option<&str>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, String> {
    let permit = THREAD_PERMITS.acquire(owner).await;
    let (sender, receiver) = oneshot::channel();
    let spawned = thread_builder().spawn(move || {
        let result = catch_unwind(AssertUnwindSafe(work));
        drop(permit);
        // The receiver is gone if the run was cancelled.
        let _ = sender.send(result.map_err(|_| check_failed()));
    });
    spawned.map_err(|error| spawn_failed(&error))?;
    receiver.await.unwrap_or_else(|_| Err(check_failed()))
}

/// Runs `work`, which limits its own time, on a thread with a large stack, and blocks until it ends.
fn run_on_scoped_thread<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, String> {
    thread::scope(|scope| {
        let spawned = thread_builder().spawn_scoped(scope, work);
        let thread = spawned.map_err(|error| spawn_failed(&error))?;
        thread.join().map_err(|_| check_failed())
    })
}

fn thread_builder() -> thread::Builder {
    thread::Builder::new()
        .name("schema".to_owned())
        .stack_size(STACK_BYTES)
}

fn spawn_failed(error: &std::io::Error) -> String {
    format!("it cannot be checked now: no thread for it ({error})")
}

fn check_failed() -> String {
    "it cannot be checked: the check broke down".to_owned()
}
