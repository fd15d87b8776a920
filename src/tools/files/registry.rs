//! Builds the file tools.

use std::sync::Arc;

use crate::config::AttachmentLimits;
use crate::domain::json_schema::Schema;
use crate::tools::files::tool::{FileTool, FileToolFn, FileToolKind};
use crate::tools::files::workdir_fs::SharedState;
use crate::tools::files::{edit, file_ops, find, grep, list, read, write};
use crate::tools::{Tool, ToolOutput};

/// All file tools by name. Results have at most `max_result` bytes, images stay within `limits`. `keys` share the
/// permits.
pub fn file_tools(
    max_result: usize,
    limits: AttachmentLimits,
    keys: &[String],
) -> Vec<(&'static str, Arc<dyn Tool>)> {
    let shared = Arc::new(SharedState::new(max_result, limits, keys));
    let shared = &shared;
    let (read, search, write) = (
        FileToolKind::Read,
        FileToolKind::Search,
        FileToolKind::Write,
    );
    let tools = [
        build_tool(
            "list_directory",
            list::DESCRIPTION,
            read,
            list::list_directory,
            shared,
        ),
        build_tool(
            "read_file",
            read::DESCRIPTION,
            read,
            read::read_file,
            shared,
        ),
        build_tool(
            "write_file",
            write::DESCRIPTION,
            write,
            write::write_file,
            shared,
        ),
        build_tool(
            "edit_file",
            edit::DESCRIPTION,
            FileToolKind::Edit,
            edit::edit_file,
            shared,
        ),
        build_tool(
            "find_path",
            find::DESCRIPTION,
            search,
            find::find_path,
            shared,
        ),
        build_tool("grep", grep::DESCRIPTION, search, grep::grep, shared),
        build_tool(
            "delete_path",
            file_ops::DELETE_DESCRIPTION,
            write,
            file_ops::delete_path,
            shared,
        ),
        build_tool(
            "move_path",
            file_ops::MOVE_DESCRIPTION,
            write,
            file_ops::move_path,
            shared,
        ),
        build_tool(
            "copy_path",
            file_ops::COPY_DESCRIPTION,
            write,
            file_ops::copy_path,
            shared,
        ),
        build_tool(
            "create_directory",
            file_ops::CREATE_DESCRIPTION,
            write,
            file_ops::create_directory,
            shared,
        ),
    ];
    tools.into_iter().flatten().collect()
}

/// `None` only if the schema of `A` is invalid; a test below rules that out.
fn build_tool<A, O>(
    name: &'static str,
    description: &'static str,
    kind: FileToolKind,
    execute: FileToolFn<A, O>,
    shared: &Arc<SharedState>,
) -> Option<(&'static str, Arc<dyn Tool>)>
where
    A: serde::de::DeserializeOwned + schemars::JsonSchema + Send + 'static,
    O: Into<ToolOutput> + Send + 'static,
{
    let schema = Schema::for_type::<A>().ok()?;
    let tool = FileTool {
        name,
        description,
        kind,
        schema,
        execute,
        shared: Arc::clone(shared),
    };
    Some((name, Arc::new(tool)))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::file_tools;
    use crate::config::AttachmentLimits;

    #[test]
    fn every_argument_has_a_description() {
        let tools = file_tools(1 << 18, AttachmentLimits::default(), &[]);
        assert_eq!(tools.len(), 10);
        for (name, tool) in &tools {
            let spec = tool.spec();
            assert_eq!(spec.name, *name);
            assert!(spec.description.len() > 40, "{name}: {}", spec.description);
            let schema: Value = serde_json::from_str(spec.parameters.get()).expect("JSON");
            assert_eq!(schema["additionalProperties"], false, "{name}");
            for (argument, property) in schema["properties"].as_object().expect("arguments") {
                assert!(
                    property["description"].is_string(),
                    "{name}: {argument}: {property}"
                );
            }
        }
    }

    #[test]
    fn schemas_state_required_arguments_and_defaults() {
        let tools = file_tools(1 << 18, AttachmentLimits::default(), &[]);
        let (_, tool) = tools.iter().find(|tool| tool.0 == "read_file").expect("it");
        let schema: Value = serde_json::from_str(tool.spec().parameters.get()).expect("JSON");
        assert_eq!(schema["required"], json!(["path"]));
        assert_eq!(schema["properties"]["path"]["type"], "string");
        assert_eq!(schema["properties"]["offset"]["default"], 1);
        assert_eq!(schema["properties"]["offset"]["minimum"], 1);
        assert_eq!(schema["properties"]["limit"]["default"], 2000);
    }
}
