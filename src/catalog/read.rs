//! Reads one agent file strictly: errors name the file, line, key and the nearest known key.

use std::path::Path;

use sha2::{Digest, Sha256};

use crate::catalog::LoadError;
use crate::catalog::context_files;
use crate::catalog::file_reader::{FileReader, ModelProblems, non_blank};
use crate::config::document;
use crate::config::table_reader::{self, TableReader};
use crate::domain::agent::settings::Section;
use crate::domain::agent::{Agent, BUILT_IN_TOOLS, is_agent_name};
use crate::domain::mcp::TOOL_NAME_SEPARATOR;

/// Tools that other settings enable.
const IMPLICIT_TOOLS: [&str; 2] = ["call_agent", "subagent"];

/// Parses the bytes of `<name>.toml` into a definition and its warnings.
pub fn read(name: &str, path: &Path, bytes: &[u8]) -> Result<(Agent, Vec<String>), LoadError> {
    let file = path.display().to_string();
    let parse_error = |problems: &[document::Problem]| {
        let details = document::format_problems(problems, &file, "; ");
        LoadError::Invalid(format!(
            "failed to parse agent config \"{name}\": {details}"
        ))
    };
    let table = document::parse(bytes).map_err(|problems| parse_error(&problems))?;
    let (parsed, problems) =
        table_reader::read_table(table, |top| parse_agent(name, version(bytes), top));
    let (rule_violations, syntax_errors): (Vec<_>, Vec<_>) =
        problems.into_iter().partition(|it| it.is_rule_violation);
    if !syntax_errors.is_empty() {
        return Err(parse_error(&syntax_errors));
    }

    let missing = |key| LoadError::Invalid(format!("agent config missing required field: {key}"));
    let ParsedAgent {
        name: own_name,
        agent,
        models,
    } = parsed;
    let own_name = own_name.ok_or_else(|| missing("name"))?;
    if let Some(key) = models.missing {
        return Err(missing(key));
    }
    if let Some(error) = models.invalid.into_iter().next() {
        return Err(error.into());
    }
    if let Some(rule) = rule_violations.into_iter().next() {
        return Err(LoadError::Invalid(rule.text));
    }
    for tool in &agent.tools {
        check_tool(tool)?;
    }
    for tool in &agent.approve {
        check_approval(&agent, tool)?;
    }
    for pattern in &agent.files {
        context_files::check_glob(pattern).map_err(LoadError::Invalid)?;
    }
    let warnings = lint(&agent, &own_name);
    Ok((agent, warnings))
}

/// The version of a definition: the digest of its file.
pub fn version(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    let mut version = String::from("sha256:");
    for byte in digest.as_slice() {
        version.push_str(&format!("{byte:02x}"));
    }
    version
}

/// The content of a file, before errors without a position are reported.
struct ParsedAgent {
    /// The key `name`; the file's name takes precedence.
    name: Option<String>,
    agent: Agent,
    models: ModelProblems,
}

fn parse_agent(stem: &str, version: String, table: &mut TableReader<'_>) -> ParsedAgent {
    let name = non_blank(table.text("name"));
    let mut agent = Agent {
        name: stem.to_owned(),
        version,
        ..Agent::default()
    };
    let mut models = ModelProblems::default();
    agent.visit(&mut FileReader {
        table,
        models: &mut models,
    });
    ParsedAgent {
        name,
        agent,
        models,
    }
}

fn check_tool(tool: &str) -> Result<(), LoadError> {
    if IMPLICIT_TOOLS.contains(&tool) {
        return Err(LoadError::Invalid(format!(
            "tool \"{tool}\" cannot be named in tools config: it is offered when sub_agents or [subagent] asks for it"
        )));
    }
    if !BUILT_IN_TOOLS.contains(&tool) {
        let text = format!("unknown tool \"{tool}\" in tools config");
        return Err(LoadError::Invalid(text));
    }
    Ok(())
}

/// An approval rule for a tool that the agent lacks is a dangerous typo, so it is an error.
fn check_approval(agent: &Agent, tool: &str) -> Result<(), LoadError> {
    let is_available = match tool {
        "call_agent" => !agent.sub_agents.is_empty(),
        "subagent" => agent.subagent.is_some(),
        "recall" => agent.context.recall,
        _ => match tool.split_once(TOOL_NAME_SEPARATOR) {
            Some((server_name, name)) => {
                let mut servers = agent.mcp_servers.iter();
                let is_named = |listed: &String| listed == name;
                servers.any(|server| {
                    let is_listed = server.tools.is_empty() || server.tools.iter().any(is_named);
                    server.name == server_name && !name.is_empty() && is_listed
                })
            }
            None => agent.tools.iter().any(|listed| listed == tool),
        },
    };
    if is_available {
        return Ok(());
    }
    Err(LoadError::Invalid(format!(
        "approve names \"{tool}\", which this agent does not have: name a tool of its tools list, call_agent (with \
         sub_agents), subagent (where it is enabled), or <server>__<tool> of one of its mcp_servers"
    )))
}

/// Returns warnings about a valid definition.
fn lint(agent: &Agent, own_name: &str) -> Vec<String> {
    let mut oddities = Vec::new();
    if own_name != agent.name {
        oddities.push(format!(
            "name is \"{own_name}\", but the file makes it \"{}\"",
            agent.name
        ));
    }
    for sub_agent in agent.sub_agents.iter().filter(|name| !is_agent_name(name)) {
        oddities.push(format!(
            "sub_agents names \"{sub_agent}\", which no agent can be called"
        ));
    }
    for pattern in agent
        .files
        .iter()
        .filter(|it| context_files::is_outside_workdir(it))
    {
        oddities.push(format!(
            "files has \"{pattern}\", which leads out of the workdir and matches nothing"
        ));
    }
    oddities
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::read;
    use crate::catalog::LoadError;
    use crate::domain::agent::Agent;
    use crate::domain::agent::response_format::ResponseFormat;

    fn agent(text: &str) -> Agent {
        let text = format!("name = \"x\"\nmodel = \"p/m\"\n{text}");
        let read = read("x", Path::new("agents/x.toml"), text.as_bytes());
        read.expect("an agent").0
    }

    fn whole_error(text: &str) -> String {
        let read = read("x", Path::new("agents/x.toml"), text.as_bytes());
        read.expect_err("an error").to_string()
    }

    fn error(text: &str) -> String {
        whole_error(&format!("name = \"x\"\nmodel = \"p/m\"\n{text}"))
    }

    /// Settings of an agent with their errors.
    const WRONG_SETTINGS: &[(&str, &str)] = &[
        (
            "fallback_models = [\"a/b\", \"c\"]",
            "invalid model format \"c\": expected provider/model-name",
        ),
        (
            "[sub_agents_config]\nmax_depth = -1",
            "sub_agents_config.max_depth must be non-negative",
        ),
        (
            "[sub_agents_config]\nmax_depth = 6",
            "sub_agents_config.max_depth cannot exceed 5",
        ),
        (
            "[sub_agents_config]\ntimeout = -1",
            "sub_agents_config.timeout must be non-negative",
        ),
        (
            "[memory]\nlast_n = -1",
            "memory.last_n must be non-negative",
        ),
        (
            "[memory]\nmax_entries = -1",
            "memory.max_entries must be non-negative",
        ),
        ("timeout = -1", "timeout must be non-negative"),
        (
            "tools = [\"hammer\"]",
            "unknown tool \"hammer\" in tools config",
        ),
        (
            "[webhook]\nurl = \"ftp://a\"",
            "webhook.url must begin with https://",
        ),
        ("[webhook]\nevents = []", "webhook.url is required"),
        (
            "[webhook]\nurl = \"https://a\"\nsecret_env = \"whsec_A=\"",
            "webhook.secret_env must be the name of an environment variable, and not the secret itself",
        ),
        (
            "[retry]\nbackoff = \"none\"",
            "retry.backoff must be one of: exponential, linear, fixed",
        ),
        (
            "[retry]\nmax_retries = -2",
            "retry.max_retries must be non-negative",
        ),
        (
            "[budget]\nmax_tokens = -1",
            "budget.max_tokens must be non-negative",
        ),
        (
            "[budget]\nmax_cost_usd = -0.5",
            "budget.max_cost_usd must be non-negative",
        ),
        (
            "[limits]\nmax_turns = 0",
            "limits.max_turns must be at least 1",
        ),
        (
            "[limits]\nmax_turns = 51",
            "limits.max_turns cannot exceed 50",
        ),
        (
            "[context]\ncompact_at = 0.05",
            "context.compact_at must be at least 0.1",
        ),
        (
            "[context]\nstrategy = \"forget\"",
            "context.strategy must be one of: compact, drop_tool_results, fail",
        ),
        (
            "[params]\ntemperature = -0.1",
            "params.temperature must be non-negative",
        ),
        ("[params]\ntop_p = 1.5", "params.top_p cannot exceed 1"),
        (
            "[params]\nmax_tokens = 0",
            "params.max_tokens must be at least 1",
        ),
        (
            "[params]\ntemperature = nan",
            "params.temperature must be a finite number",
        ),
        (
            "[params.response_format]\ntype = \"json_schema\"",
            "params.response_format.schema is required when type is json_schema",
        ),
        (
            "[params.response_format]\ntype = \"yaml\"",
            "params.response_format.type must be one of: text, json_object, json_schema",
        ),
        (
            "files = [\"[\"]",
            "invalid glob pattern \"[\": unclosed character class; missing ']'",
        ),
    ];

    #[test]
    fn the_texts_match_the_contract() {
        for (text, expected) in [
            (
                "model = \"p/m\"",
                "agent config missing required field: name",
            ),
            (
                "name = \" \"\nmodel = \"p/m\"",
                "agent config missing required field: name",
            ),
            ("", "agent config missing required field: name"),
            ("name = \"x\"", "agent config missing required field: model"),
            (
                "name = \"x\"\nmodel = \"gpt\"",
                "invalid model format \"gpt\": expected provider/model-name",
            ),
            (
                "name = \"x\"\nmodel = \"/gpt\"",
                "invalid model format \"/gpt\": empty provider",
            ),
            (
                "name = \"x\"\nmodel = \"p/\"",
                "invalid model format \"p/\": empty model name",
            ),
        ] {
            assert_eq!(whole_error(text), expected);
        }
        for (text, expected) in WRONG_SETTINGS {
            assert_eq!(error(text), *expected);
        }
        assert!(
            error("tools = [\"call_agent\"]").starts_with("tool \"call_agent\" cannot be named")
        );
        let shape = read("x", Path::new("x.toml"), b"name = \"x\"\nmodel = \"gpt\"");
        assert!(matches!(shape, Err(LoadError::Model(_))));
    }

    #[test]
    fn other_errors_name_file_line_key_and_the_nearest_key() {
        assert_eq!(
            whole_error("name = \"x\"\n\nmodle = \"p/m\"\n"),
            "failed to parse agent config \"x\": agents/x.toml:3:1: unknown key \"modle\"; did you mean \"model\"?"
        );
        // The same text as in a request.
        assert_eq!(
            error("[params]\neffort = \"low\""),
            "failed to parse agent config \"x\": agents/x.toml:4:1: params.effort belongs at the top of the file, \
             above its first [table]"
        );
        assert_eq!(
            error("[params]\nstop = \"x\"\n[memory]\nlastn = 3"),
            "failed to parse agent config \"x\": agents/x.toml:4:1: params.stop must be a list of strings, not a string; \
             agents/x.toml:6:1: unknown key \"memory.lastn\"; did you mean \"memory.last_n\"?"
        );
        assert!(
            error("timeout = ").starts_with("failed to parse agent config \"x\": agents/x.toml:3:")
        );
    }

    #[test]
    fn disabled_sections_may_be_present() {
        let off = agent(
            "approve = []\napprove_timeout = 3\nallowed_hosts = []\nmcp_servers = []\n[subagent]\nenabled = false\n\
             max_depth = 2\n[webhook]",
        );
        assert!(off.subagent.is_none() && off.webhook.is_none());
    }

    #[test]
    fn approve_lists_only_available_tools() {
        let server = "[[mcp_servers]]\nname = \"fs\"\ntransport = \"stdio\"\ncommand = \"x\"\ntools = [\"ls\"]\n";
        let read = agent(&format!(
            "tools = [\"grep\"]\nsub_agents = [\"a\"]\napprove_timeout = 5\n\
             approve = [\"grep\", \"call_agent\", \"fs__ls\", \"grep\"]\n{server}"
        ));
        assert_eq!(read.approve, ["grep", "call_agent", "fs__ls"]);
        assert_eq!(
            read.approve_timeout,
            Some(std::time::Duration::from_secs(5))
        );
        for wrong in [
            "grpe",
            "read_file",
            "subagent",
            "fs__rm",
            "other__ls",
            "fs__",
            "",
        ] {
            let message = error(&format!(
                "tools = [\"grep\"]\nsub_agents = [\"a\"]\napprove = [{wrong:?}]\n{server}"
            ));
            let expected = format!("approve names {wrong:?}, which this agent does not have");
            assert!(message.starts_with(&expected), "{message}");
        }
    }

    #[test]
    fn zero_means_unset_and_duplicates_are_merged() {
        let agent = agent(
            "timeout = 0\nsub_agents = [\"b\", \"a\", \"b\"]\n[sub_agents_config]\nmax_depth = 0\ntimeout = 0\n\
             max_concurrent = 0\n[budget]\nmax_tokens = 0\nmax_cost_usd = 0\n[params]\ntemperature = 0\n",
        );
        assert_eq!(agent.timeout, None);
        assert_eq!(agent.sub_agents, ["b", "a"]);
        assert_eq!(agent.delegation, Default::default());
        assert_eq!(agent.budget, Default::default());
        assert_eq!(agent.params.temperature, Some(0.0));
        assert_eq!(agent.max_turns, 50);
    }

    #[test]
    fn a_schema_is_a_table_or_json_text() {
        let raw = |text: &str| match agent(text).params.response_format {
            ResponseFormat::JsonSchema(schema) => schema.get().to_owned(),
            other => panic!("{other:?}"),
        };
        let head = "[params.response_format]\ntype = \"json_schema\"\n";
        assert_eq!(
            raw(&format!(
                "{head}schema = {{ type = \"object\", required = [\"b\"], minProperties = 1 }}"
            )),
            r#"{"type":"object","required":["b"],"minProperties":1}"#
        );
        assert_eq!(
            raw(&format!("{head}schema = '{{\"type\": \"object\"}}'")),
            r#"{"type":"object"}"#
        );
        let wrong = error(&format!("{head}schema = 'nonsense'"));
        assert!(
            wrong.starts_with("params.response_format.schema is text, but no JSON"),
            "{wrong}"
        );
    }

    #[test]
    fn a_mismatch_of_names_is_a_warning_and_the_file_wins() {
        let text = b"name = \"y\"\nmodel = \"p/m\"\nsub_agents = [\"../z\"]\nfiles = [\"../*\"]";
        let (agent, warnings) = read("x", Path::new("x.toml"), text).expect("an agent");
        assert_eq!(agent.name, "x");
        assert_eq!(warnings.len(), 3);
        assert!(agent.version.starts_with("sha256:") && agent.version.len() == 7 + 64);
    }
}
