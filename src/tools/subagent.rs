//! `subagent`: starts an ad-hoc sub-agent with its caller's model, prompt and tools. Checks the call in the contract's
//! order, starts the child run, and truncates the result.

use futures_util::future::BoxFuture;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value};

use crate::domain::agent::{AdHocSettings, MAX_TURNS, SubagentSettings as Settings, SummaryMode};
use crate::domain::message::{ToolCall, ToolSpec, shorten, truncate_to_bytes};
use crate::tools::{AdHocRequest, CallContext, Effect, Tool, ToolOutput, background};

pub const NAME: &str = "subagent";
const ARGUMENT_NAMES: [&str; 6] = [
    "label",
    "task_prompt",
    "summary_prompt",
    "allowed_tools",
    "max_turns",
    // The last one: only if the agent may start sub-agents in the background.
    "background",
];
/// Ends a truncated result.
const TRUNCATION_MARK: &str = "... (truncated)";
const DESCRIPTION: &str = "Delegate a focused task to a recursive agent instance with isolated conversation context. Use this \
                           when you need to explore a sub-problem independently without polluting the main conversation.";
/// Longer labels are truncated.
const MAX_LABEL_CHARS: usize = 200;
/// Used if the call has no summary prompt of its own.
const DEFAULT_SUMMARY_PROMPT: &str = "Summarize your findings concisely";

/// The tool as one agent has it.
pub struct Subagent {
    settings: Settings,
    /// The tools that its caller has, which the child may be given.
    tools: Vec<String>,
    /// Further tools of the caller, which are found by searching.
    deferred: Vec<String>,
    /// Whether a call may start a child in the background.
    background: bool,
}

impl Subagent {
    pub fn new(
        settings: Settings,
        tools: Vec<String>,
        deferred: Vec<String>,
        background: bool,
    ) -> Self {
        Self {
            settings,
            tools,
            deferred,
            background,
        }
    }

    /// Reads a call's arguments and checks them in the order of the contract.
    fn parse_arguments(&self, json: &RawValue) -> Result<Arguments, String> {
        let names = &ARGUMENT_NAMES[..ARGUMENT_NAMES.len() - usize::from(!self.background)];
        let raw = RawArguments::parse(json, names)?;
        if raw.task.trim().is_empty() {
            return Err("task_prompt cannot be empty".to_owned());
        }
        if raw.label.trim().is_empty() {
            return Err("label cannot be empty".to_owned());
        }
        let max_turns = match raw.max_turns {
            None => self.settings.default_max_turns,
            Some(turns)
                if turns.fract() == 0.0 && (1.0..=f64::from(MAX_TURNS)).contains(&turns) =>
            {
                turns as u32
            }
            Some(_) => return Err(format!("max_turns must be between 1 and {MAX_TURNS}")),
        };
        for tool in raw.allowed_tools.iter().flatten() {
            if tool == NAME {
                return Err("Subagent cannot have 'subagent' in allowed_tools".to_owned());
            }
            if !self.tools.contains(tool) && !self.deferred.contains(tool) {
                return Err(format!(
                    "Unknown tool in allowed_tools: {}",
                    shorten(tool, 200)
                ));
            }
        }
        let summary_prompt = match self.settings.summary {
            SummaryMode::OnRequest => raw.summary_prompt,
            SummaryMode::Always => Some(
                raw.summary_prompt
                    .unwrap_or_else(|| DEFAULT_SUMMARY_PROMPT.to_owned()),
            ),
        };
        Ok(Arguments {
            // Every list of runs shows it.
            label: shorten(&raw.label, MAX_LABEL_CHARS),
            task: raw.task,
            background: raw.background,
            max_turns,
            ad_hoc: AdHocSettings {
                allowed_tools: raw.allowed_tools,
                summary_prompt,
            },
        })
    }
}

impl Tool for Subagent {
    fn spec(&self) -> ToolSpec {
        let mut properties = serde_json::json!({
            "label": {
                "type": "string",
                "description": "Unique identifier for this subagent (e.g., 'research_api_docs', 'analyze_logs')",
            },
            "task_prompt": {
                "type": "string",
                "description": "The specific task for the subagent to complete. Should be self-contained.",
            },
            "summary_prompt": {
                "type": "string",
                "description": format!("Optional: How to summarize results (default: '{DEFAULT_SUMMARY_PROMPT}')"),
            },
            "allowed_tools": {
                "type": "array",
                "items": { "type": "string" },
                "description": "Optional: Whitelist of tool names subagent can use. Omit to allow all tools.",
            },
            "max_turns": {
                "type": "integer",
                "minimum": 1,
                "maximum": MAX_TURNS,
                "description": format!(
                    "Optional: Maximum conversation turns for subagent (default: {})",
                    self.settings.default_max_turns
                ),
            },
        });
        if self.background {
            properties["background"] =
                serde_json::json!({"type": "boolean", "description": background::ARGUMENT});
        }
        let parameters = serde_json::json!({
            "type": "object",
            "properties": properties,
            "required": ["label", "task_prompt"],
        });
        ToolSpec {
            name: NAME.to_owned(),
            description: DESCRIPTION.to_owned(),
            parameters: to_raw_value(&parameters).unwrap_or_default().into(),
        }
    }

    fn effect(&self) -> Effect {
        Effect::Delegating
    }

    fn call<'a>(
        &'a self,
        call: &'a ToolCall,
        context: CallContext<'a>,
    ) -> BoxFuture<'a, Result<ToolOutput, String>> {
        Box::pin(async move {
            context.delegate.check_quota(&call.id).await?;
            let limit = context.scope.max_ad_hoc_depth(self.settings.max_depth);
            if context.scope.depth.0 >= limit {
                return Err(format!(
                    "Maximum subagent recursion depth ({limit}) exceeded. Current depth: {}. Cannot spawn nested subagent.",
                    context.scope.depth.0
                ));
            }
            let arguments = self.parse_arguments(&call.arguments)?;
            let request = AdHocRequest {
                tool_call_id: &call.id,
                label: &arguments.label,
                task: &arguments.task,
                max_turns: arguments.max_turns,
                ad_hoc: arguments.ad_hoc,
                background: arguments.background,
            };
            let result = context.delegate.run_ad_hoc(request).await?;
            Ok(truncate(result, self.settings.output_max_size).into())
        })
    }
}

/// A call's checked arguments.
#[derive(Debug)]
struct Arguments {
    label: String,
    task: String,
    background: bool,
    max_turns: u32,
    ad_hoc: AdHocSettings,
}

/// A call's arguments with the right types, before their values are checked.
struct RawArguments {
    label: String,
    task: String,
    summary_prompt: Option<String>,
    allowed_tools: Option<Vec<String>>,
    max_turns: Option<f64>,
    background: bool,
}

impl RawArguments {
    /// `names` are those of the arguments that there are.
    fn parse(json: &RawValue, names: &[&str]) -> Result<Self, String> {
        let arguments: Map<String, Value> = serde_json::from_str(json.get()).map_err(|error| {
            format!("subagent error: the arguments are not a JSON object: {error}")
        })?;
        let mut keys = arguments.keys();
        if let Some(unknown) = keys.find(|key| !names.contains(&key.as_str())) {
            let unknown = shorten(unknown, 100);
            return Err(format!(
                "subagent error: there is no argument \"{unknown}\"; it takes {}",
                names.join(", ")
            ));
        }
        let text = |key: &str| match arguments.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(_) => Err(format!("subagent error: \"{key}\" must be a string")),
        };
        let required = |key: &str| {
            text(key)?.ok_or_else(|| format!("subagent error: \"{key}\" argument is required"))
        };
        let (label, task) = (required("label")?, required("task_prompt")?);
        let summary_prompt = text("summary_prompt")?.filter(|text| !text.trim().is_empty());
        let allowed_tools = match arguments.get("allowed_tools") {
            None | Some(Value::Null) => None,
            Some(list) => Some(
                string_list(list)
                    .ok_or("subagent error: \"allowed_tools\" must be a list of strings")?,
            ),
        };
        let max_turns = match arguments.get("max_turns") {
            None | Some(Value::Null) => None,
            Some(Value::Number(number)) => Some(number.as_f64().unwrap_or_default()),
            Some(_) => {
                return Err("subagent error: \"max_turns\" must be a whole number".to_owned());
            }
        };
        let background = match arguments.get("background") {
            None | Some(Value::Null) => false,
            Some(Value::Bool(background)) => *background,
            Some(_) => {
                return Err("subagent error: \"background\" must be true or false".to_owned());
            }
        };
        Ok(Self {
            label,
            task,
            summary_prompt,
            allowed_tools,
            max_turns,
            background,
        })
    }
}

fn string_list(list: &Value) -> Option<Vec<String>> {
    let text = |item: &Value| item.as_str().map(str::to_owned);
    list.as_array()?.iter().map(text).collect()
}

/// Truncates the text to `max_bytes`, including the mark.
pub fn truncate(mut text: String, max_bytes: usize) -> String {
    if text.len() <= max_bytes {
        return text;
    }
    text.truncate(truncate_to_bytes(&text, max_bytes.saturating_sub(TRUNCATION_MARK.len())).len());
    text.push_str(TRUNCATION_MARK);
    text
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{Subagent, truncate};
    use crate::domain::agent::{SubagentSettings as Settings, SummaryMode};
    use crate::tools::Tool;

    fn parse(arguments: &Value) -> Result<super::Arguments, String> {
        let tool = Subagent::new(
            Settings::default(),
            vec!["grep".to_owned()],
            Vec::new(),
            false,
        );
        tool.parse_arguments(&serde_json::value::to_raw_value(arguments).expect("JSON"))
    }

    #[test]
    fn the_model_reads_the_contracts_descriptions() {
        let spec = Subagent::new(Settings::default(), Vec::new(), Vec::new(), false).spec();
        assert!(
            spec.description
                .starts_with("Delegate a focused task to a recursive agent instance")
                && spec
                    .description
                    .ends_with("without polluting the main conversation."),
            "{}",
            spec.description
        );
        let parameters: Value = serde_json::from_str(spec.parameters.get()).expect("JSON");
        for (name, description) in [
            (
                "summary_prompt",
                "Optional: How to summarize results (default: 'Summarize your findings concisely')",
            ),
            (
                "allowed_tools",
                "Optional: Whitelist of tool names subagent can use. Omit to allow all tools.",
            ),
            (
                "max_turns",
                "Optional: Maximum conversation turns for subagent (default: 10)",
            ),
        ] {
            assert_eq!(parameters["properties"][name]["description"], description);
        }
    }

    #[test]
    fn arguments_are_checked_in_order() {
        for (arguments, why) in [
            (
                json!({"task_prompt": "x"}),
                "subagent error: \"label\" argument is required",
            ),
            (
                json!({"label": "a"}),
                "subagent error: \"task_prompt\" argument is required",
            ),
            (
                json!({"label": 1, "task_prompt": "x"}),
                "subagent error: \"label\" must be a string",
            ),
            (
                json!({"label": "", "task_prompt": " "}),
                "task_prompt cannot be empty",
            ),
            (
                json!({"label": " ", "task_prompt": "x", "max_turns": 0}),
                "label cannot be empty",
            ),
            (
                json!({"label": "a", "task_prompt": "x", "max_turns": 51, "allowed_tools": ["subagent"]}),
                "max_turns must be between 1 and 50",
            ),
            (
                json!({"label": "a", "task_prompt": "x", "max_turns": 1.5}),
                "max_turns must be between 1 and 50",
            ),
            (
                json!({"label": "a", "task_prompt": "x", "allowed_tools": ["subagent", "fly"]}),
                "Subagent cannot have 'subagent' in allowed_tools",
            ),
            (
                json!({"label": "a", "task_prompt": "x", "allowed_tools": ["grep", "fly"]}),
                "Unknown tool in allowed_tools: fly",
            ),
        ] {
            assert_eq!(parse(&arguments).expect_err("an error"), why, "{arguments}");
        }
        let parsed = parse(&json!({"label": "a", "task_prompt": "x", "allowed_tools": []}))
            .expect("arguments");
        assert_eq!(parsed.ad_hoc.allowed_tools, Some(Vec::new()));
        assert_eq!((parsed.max_turns, parsed.ad_hoc.summary_prompt), (10, None));
        let long = json!({"label": "x".repeat(1_000_000), "task_prompt": "x"});
        assert_eq!(parse(&long).expect("arguments").label.len(), 203);
    }

    #[test]
    fn summary_always_adds_a_default_prompt() {
        let settings = Settings {
            summary: SummaryMode::Always,
            ..Settings::default()
        };
        let tool = Subagent::new(settings, Vec::new(), Vec::new(), false);
        let arguments = serde_json::value::to_raw_value(&json!({"label": "a", "task_prompt": "x"}));
        let parsed = tool
            .parse_arguments(&arguments.expect("JSON"))
            .expect("arguments");
        assert_eq!(
            parsed.ad_hoc.summary_prompt.as_deref(),
            Some("Summarize your findings concisely")
        );
    }

    #[test]
    fn a_long_result_is_truncated_on_a_character_boundary() {
        assert_eq!(truncate("short".to_owned(), 1024), "short");
        let text = truncate("ä".repeat(1000), 1024);
        assert!(text.ends_with("ä... (truncated)"), "{text}");
        assert!((1020..=1024).contains(&text.len()), "{}", text.len());
    }
}
