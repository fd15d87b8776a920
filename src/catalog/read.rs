//! Reads one agent file strictly: errors name the file, line, key and the nearest known key.

use std::path::Path;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::catalog::documents::{AgentDocuments, Documents};
use crate::catalog::file_checks::{check_names, lint};
use crate::catalog::{Draft, LoadError, http_tools, mcp_servers, schedules, scorers, triggers};
use crate::config::environment::home_dir;
use crate::domain::agent::Agent;
use crate::settings::document::{self, MAX_SHOWN_PROBLEMS, Problem, ProblemKind};
use crate::settings::positions::Positions;
use crate::settings::section::Section;
use crate::settings::table_reader::{self, TableReader};

/// A document with every list of tables, for messages about keys in the wrong table.
const SAMPLE: &str = "[[http_tools]]\n[[http_tools]]\nopenapi = \"\"\n[[mcp_servers]]\n[[schedules]]\n[[scorers]]\n[[triggers]]\n";

/// A valid agent file.
#[derive(Clone, Debug)]
pub struct AgentFile {
    pub agent: Agent,
    /// What is suspicious in the file itself, whatever the server is.
    pub warnings: Vec<Problem>,
    pub positions: Positions,
}

/// Why a file is no definition.
#[derive(Clone, Debug)]
pub struct InvalidFile {
    /// For clients that start a run: the contract's texts.
    pub error: LoadError,
    /// Every error, sorted by position.
    pub problems: Vec<Problem>,
    /// What the file would define without its errors, for a check; `None` if it is not TOML.
    pub draft: Option<Arc<Draft>>,
}

/// The key `name` of a file.
pub fn own_name(bytes: &[u8]) -> Option<String> {
    let table = document::parse(bytes).ok()?;
    match &table.get("name")?.value {
        document::Value::String(name) => Some(name.clone()),
        _ => None,
    }
}

/// The candidate that a file names.
pub fn candidate_name(bytes: &[u8]) -> Option<String> {
    let table = document::parse(bytes).ok()?;
    let document::Value::Table(rollout) = &table.get("rollout")?.value else {
        return None;
    };
    match &rollout.get("candidate")?.value {
        document::Value::String(name) => Some(name.clone()),
        _ => None,
    }
}

/// Parses the bytes of `<name>.toml`.
///
/// # Errors
/// Everything that is wrong with them.
pub fn read(name: &str, path: &Path, bytes: &[u8]) -> Result<AgentFile, InvalidFile> {
    read_with(name, path, bytes, &Documents::default())
}

/// As [`read`], with a copy of the documents that the file names by URL.
///
/// # Errors
/// Everything that is wrong with them.
pub fn read_with(
    name: &str,
    path: &Path,
    bytes: &[u8],
    documents: &Documents,
) -> Result<AgentFile, InvalidFile> {
    let documents = documents.of_agent(path, bytes);
    let file = path.display().to_string();
    let malformed = |problems: Vec<Problem>| {
        let details = document::format_problems(&problems, &file, "; ");
        let text = format!("failed to parse agent config \"{name}\": {details}");
        let error = LoadError::Invalid(text);
        InvalidFile {
            error,
            problems,
            draft: None,
        }
    };
    let table = document::parse(bytes).map_err(malformed)?;
    let positions = Positions::of(&table);
    let home = home_dir();
    let parse = |top: &mut TableReader<'_>| parse_agent(name, bytes, &documents, top);
    let (parsed, problems) = table_reader::read_table(table, SAMPLE, home.as_deref(), parse);
    let is_malformed = problems.iter().any(|it| it.kind == ProblemKind::Malformed);

    let (agent, own_name) = parsed;
    let missing = [
        ("name", own_name.is_none()),
        ("model", agent.model.is_unset()),
    ];
    // A wrong value is no missing one.
    let is_reported = |key: &str| {
        problems
            .iter()
            .any(|it| positions.get(key) == Some(&it.origin))
    };
    let missing = missing
        .into_iter()
        .filter(|(key, is_missing)| *is_missing && !is_reported(key));
    let missing = missing.map(|(key, _)| {
        let text = format!("agent config missing required field: {key}");
        positions.problem(key, text, ProblemKind::RuleViolation)
    });
    let missing: Vec<Problem> = missing.collect();
    let is_reference = |problem: &Problem| problem.kind == ProblemKind::WrongReference;
    let (references, problems): (Vec<Problem>, Vec<Problem>) =
        problems.into_iter().partition(is_reference);
    let others = references.into_iter().chain(problems);
    let others = others.chain(check_names(&agent, &positions));
    let others: Vec<Problem> = others
        .chain(schedules::check_inputs(&agent, &positions))
        .collect();
    if is_malformed {
        let mut invalid = malformed(sorted(others));
        // A misspelled key is missing, too: only a check lists both.
        invalid.problems.extend(missing);
        invalid.problems = sorted(invalid.problems);
        invalid.draft = Some(Arc::new(Draft { agent, positions }));
        return Err(invalid);
    }
    let all = [missing, others].concat();
    if !all.is_empty() {
        let error = match all.as_slice() {
            [model] if is_reference(model) => LoadError::Model(model.text.clone()),
            _ => LoadError::Invalid(join_texts(&all)),
        };
        return Err(InvalidFile {
            error,
            problems: sorted(all),
            draft: Some(Arc::new(Draft { agent, positions })),
        });
    }
    let warnings = lint(&agent, own_name.as_deref().unwrap_or_default(), &positions);
    Ok(AgentFile {
        agent,
        warnings,
        positions,
    })
}

fn sorted(mut problems: Vec<Problem>) -> Vec<Problem> {
    problems.sort_by(|a, b| a.origin.cmp(&b.origin));
    problems
}

/// The first texts in the order of the checks.
fn join_texts(problems: &[Problem]) -> String {
    let texts = problems.iter().take(MAX_SHOWN_PROBLEMS);
    let mut texts: Vec<&str> = texts.map(|problem| problem.text.as_str()).collect();
    let more = format!("and {} more", problems.len().saturating_sub(texts.len()));
    if problems.len() > texts.len() {
        texts.push(&more);
    }
    texts.join("; ")
}

/// The version of a definition: the digest of its file, and of the tools that other documents describe.
fn version(bytes: &[u8], agent: &Agent) -> String {
    let mut digest = Sha256::new_with_prefix(bytes);
    for tool in agent.http_tools.iter().filter(|it| it.placement.is_some()) {
        digest.update(serde_json::to_vec(tool).unwrap_or_default());
    }
    let digest = digest.finalize();
    let mut version = String::from("sha256:");
    for byte in digest.as_slice() {
        version.push_str(&format!("{byte:02x}"));
    }
    version
}

/// The agent, and its key `name`; the file's name takes precedence.
fn parse_agent(
    stem: &str,
    bytes: &[u8],
    documents: &AgentDocuments<'_>,
    table: &mut TableReader<'_>,
) -> (Agent, Option<String>) {
    let name = table.text("name").filter(|name| !name.trim().is_empty());
    let mut agent = Agent {
        name: stem.to_owned(),
        ..Agent::default()
    };
    let settings = &mut agent.settings;
    settings.read(table);
    settings.mcp_servers = mcp_servers::read(table, "mcp_servers");
    settings.http_tools = http_tools::read(table, "http_tools", documents);
    settings.schedules = schedules::read(table, "schedules");
    settings.triggers = triggers::read(table, "triggers");
    settings.scorers = scorers::read(table, "scorers");
    agent.version = version(bytes, &agent);
    (agent, name)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{AgentFile, InvalidFile, read};
    use crate::catalog::LoadError;
    use crate::domain::agent::response_format::ResponseFormat;
    use crate::domain::agent::{Agent, BUILT_IN_TOOLS};

    fn agent(text: &str) -> Agent {
        let text = format!("name = \"x\"\nmodel = \"p/m\"\n{text}");
        let read = read("x", Path::new("agents/x.toml"), text.as_bytes());
        read.expect("an agent").agent
    }

    fn invalid_file(text: &str) -> InvalidFile {
        let read = read("x", Path::new("agents/x.toml"), text.as_bytes());
        read.expect_err("an error")
    }

    fn whole_error(text: &str) -> String {
        invalid_file(text).error.to_string()
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
            "[sub_agents_config]\non_end = \"wait\"",
            "sub_agents_config.on_end needs background = true, which allows sub-agents in the background",
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
            "webhook.url must begin with http:// or https://",
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
            (
                "",
                "agent config missing required field: name; agent config missing required field: model",
            ),
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
        let shape = invalid_file("name = \"x\"\nmodel = \"gpt\"");
        assert!(matches!(shape.error, LoadError::Model(_)));
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
    fn every_error_of_a_file_is_found_at_once() {
        let text = "name = \"x\"\nmodel = \"gpt\"\ntools = [\"read_files\",\n  \"hammer\"]\nmax_turns = 3\n\
                    [memory]\nlast_n = -1\n";
        let shown = invalid_file(text).problems.into_iter();
        let shown: Vec<_> = shown.map(|it| it.format_with_severity("x.toml")).collect();
        let tools = BUILT_IN_TOOLS.join(", ");
        assert_eq!(
            shown,
            [
                "x.toml:2:1: error: invalid model format \"gpt\": expected provider/model-name".to_owned(),
                "x.toml:3:10: error: unknown tool \"read_files\" in tools config; did you mean \"read_file\"?"
                    .to_owned(),
                format!(
                    "x.toml:4:3: error: unknown tool \"hammer\" in tools config; the tools are: {tools}"
                ),
                "x.toml:5:1: error: unknown key \"max_turns\"; it belongs in [limits]".to_owned(),
                "x.toml:7:1: error: memory.last_n must be non-negative".to_owned(),
            ]
        );
        // Without a malformed key, clients that start a run get the contract's texts.
        assert_eq!(
            error("tools = [\"hammer\"]\n[memory]\nlast_n = -1\nmax_entries = -1"),
            "memory.last_n must be non-negative; memory.max_entries must be non-negative; \
             unknown tool \"hammer\" in tools config"
        );
    }

    #[test]
    fn a_key_in_the_wrong_table_is_shown_its_place() {
        for (text, expected) in [
            ("temperature = 1", "\"temperature\"; it belongs in [params]"),
            (
                "max_depth = 1",
                "\"max_depth\"; it belongs in [sub_agents_config] or in [subagent]",
            ),
            (
                "[params]\nsub_agents = []",
                "\"params.sub_agents\"; it belongs at the top of the file, above its first [table]",
            ),
            (
                "command = \"x\"",
                "\"command\"; it belongs in [[mcp_servers]]",
            ),
        ] {
            let found = error(text);
            assert!(
                found.ends_with(&format!("unknown key {expected}")),
                "{found}"
            );
        }
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
        assert_eq!(agent.limits.max_turns, 50);
    }

    #[test]
    fn a_schema_is_a_table_or_json_text() {
        let raw = |text: &str| match agent(text).settings.params.response_format {
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
        let AgentFile {
            agent, warnings, ..
        } = read("x", Path::new("x.toml"), text).expect("an agent");
        assert_eq!(agent.name, "x");
        let shown = warnings.iter().map(|it| it.format_with_severity("x.toml"));
        assert_eq!(
            shown.collect::<Vec<_>>(),
            [
                "x.toml:1:1: warning: name is \"y\", but the file makes it \"x\"",
                "x.toml:3:15: error: sub_agents names \"../z\", which no agent can be called",
                "x.toml:4:10: error: files has \"../*\", which leads out of the workdir and matches nothing",
            ]
        );
        assert!(agent.version.starts_with("sha256:") && agent.version.len() == 7 + 64);
    }
}
