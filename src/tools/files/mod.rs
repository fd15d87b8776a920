//! The tools for the files of a run's workdir. They reach files through the workdir's handle only, so that no path and no
//! link leads out of it; they work on threads of their own and end early when nobody waits any more.

use std::sync::Arc;

use crate::config::AttachmentLimits;
use crate::domain::schema::Schema;
use crate::tools::files::ground::Shared;
use crate::tools::files::tool::{FileTool, Kind, Perform};
use crate::tools::{Output, Tool};

#[cfg(test)]
mod attacks;
mod change;
mod edit;
mod find;
mod grep;
mod ground;
mod ignored;
mod list;
mod pattern;
mod read;
mod sorted;
mod tool;
mod trees;
mod walk;
mod write;

/// All of them, each by its name. No result is longer than `max_result` bytes, and no picture larger than `limits` say;
/// these keys share the turns to search.
pub fn all(
    max_result: usize,
    limits: AttachmentLimits,
    keys: &[String],
) -> Vec<(&'static str, Arc<dyn Tool>)> {
    let shared = Arc::new(Shared::new(max_result, limits, keys));
    let shared = &shared;
    let (reads, searches, changes) = (Kind::Reads, Kind::Searches, Kind::Changes);
    let tools = [
        make("list_directory", list::ABOUT, reads, list::list, shared),
        make("read_file", read::ABOUT, reads, read::read, shared),
        make("write_file", write::ABOUT, changes, write::write, shared),
        make("edit_file", edit::ABOUT, changes, edit::edit, shared),
        make("find_path", find::ABOUT, searches, find::find, shared),
        make("grep", grep::ABOUT, searches, grep::grep, shared),
        make(
            "delete_path",
            change::ABOUT_DELETE,
            changes,
            change::delete,
            shared,
        ),
        make(
            "move_path",
            change::ABOUT_MOVE,
            changes,
            change::move_,
            shared,
        ),
        make(
            "copy_path",
            change::ABOUT_COPY,
            changes,
            change::copy,
            shared,
        ),
        make(
            "create_directory",
            change::ABOUT_CREATE,
            changes,
            change::create,
            shared,
        ),
    ];
    tools.into_iter().flatten().collect()
}

/// None only where the arguments' schema is none, which the test below rules out.
fn make<A, O>(
    name: &'static str,
    about: &'static str,
    kind: Kind,
    perform: Perform<A, O>,
    shared: &Arc<Shared>,
) -> Option<(&'static str, Arc<dyn Tool>)>
where
    A: serde::de::DeserializeOwned + schemars::JsonSchema + Send + 'static,
    O: Into<Output> + Send + 'static,
{
    let schema = Schema::of::<A>().ok()?;
    let tool = FileTool {
        name,
        about,
        kind,
        schema,
        perform,
        shared: Arc::clone(shared),
    };
    Some((name, Arc::new(tool)))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::all;
    use crate::config::AttachmentLimits;

    #[test]
    fn models_are_told_what_each_argument_means() {
        let tools = all(1 << 18, AttachmentLimits::default(), &[]);
        assert_eq!(tools.len(), 10);
        for (name, tool) in &tools {
            let spec = tool.spec();
            assert_eq!(spec.name, *name);
            assert!(spec.description.len() > 40, "{name}: {}", spec.description);
            let schema: Value = serde_json::from_str(spec.parameters.get()).expect("JSON");
            assert_eq!(schema["additionalProperties"], false, "{name}");
            for (argument, about) in schema["properties"].as_object().expect("arguments") {
                assert!(
                    about["description"].is_string(),
                    "{name}: {argument}: {about}"
                );
            }
        }
    }

    #[test]
    fn a_schema_says_what_is_needed_and_what_is_taken_otherwise() {
        let tools = all(1 << 18, AttachmentLimits::default(), &[]);
        let (_, read) = tools.iter().find(|tool| tool.0 == "read_file").expect("it");
        let schema: Value = serde_json::from_str(read.spec().parameters.get()).expect("JSON");
        assert_eq!(schema["required"], json!(["path"]));
        assert_eq!(schema["properties"]["path"]["type"], "string");
        assert_eq!(schema["properties"]["offset"]["default"], 1);
        assert_eq!(schema["properties"]["offset"]["minimum"], 1);
        assert_eq!(schema["properties"]["limit"]["default"], 2000);
    }
}
