//! Checks what the keys of one agent file say together: names of tools and agents, globs, templates.

use std::sync::Arc;

use crate::catalog::{context_files, schemas};
use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::agent::{Agent, BUILT_IN_TOOLS, is_agent_name};
use crate::domain::gate::Gate;
use crate::domain::mcp::TOOL_NAME_SEPARATOR;
use crate::domain::skill::{self, MAX_SKILLS, READ_SKILL};
use crate::settings::document::{Problem, ProblemKind};
use crate::settings::positions::{self, Positions};
use crate::settings::suggestion;

/// Tools that other settings enable.
const IMPLICIT_TOOLS: [&str; 2] = ["call_agent", "subagent"];

/// Checks the tools and globs that the file names.
pub fn check_names(agent: &Agent, positions: &Positions) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut push = |list: &str, name: &str, checked: Result<(), String>, hint| {
        if let Err(text) = checked {
            let path = positions::item(list, name);
            let problem = positions.problem(&path, text, ProblemKind::RuleViolation);
            problems.push(problem.with_hint(hint));
        }
    };
    for tool in &agent.tools {
        let closest = suggestion::closest(tool, BUILT_IN_TOOLS.iter().copied());
        let closest =
            closest.filter(|_| !IMPLICIT_TOOLS.contains(&tool.as_str()) && tool != READ_SKILL);
        let hint = closest.map(|name| format!("did you mean \"{name}\"?"));
        let hint = hint.or_else(|| Some(format!("the tools are: {}", BUILT_IN_TOOLS.join(", "))));
        push("tools", tool, check_tool(tool), hint);
    }
    for tool in &agent.approve {
        push("approve", tool, check_approval(agent, tool), None);
    }
    for entry in &agent.skills {
        push("skills", entry, check_skill(agent, entry), None);
    }
    for glob in &agent.files {
        push("files", glob, context_files::check_glob(glob), None);
    }
    problems.extend(check_background(agent, positions));
    problems.extend(check_rollout(agent, positions));
    problems.extend(check_schemas(agent, positions));
    problems.extend(check_template(agent, positions));
    problems
}

fn check_schemas(agent: &Agent, positions: &Positions) -> Vec<Problem> {
    let format = match &agent.params.response_format {
        ResponseFormat::JsonSchema(schema) => Some(schema),
        ResponseFormat::Text | ResponseFormat::JsonObject => None,
    };
    let schemas = [
        ("input_schema", agent.input_schema.as_ref()),
        ("params.response_format.schema", format),
    ];
    let faults = schemas.into_iter().filter_map(|(path, schema)| {
        let why = schemas::compile(Arc::clone(schema?)).err()?;
        let text = format!("{path} {why}");
        Some(positions.problem(path, text, ProblemKind::RuleViolation))
    });
    faults.collect()
}

/// What happens to agents in the background is said only where there are some.
fn check_background(agent: &Agent, positions: &Positions) -> Option<Problem> {
    let delegation = &agent.delegation;
    if delegation.background || delegation.on_end.is_none() {
        return None;
    }
    let path = "sub_agents_config.on_end";
    let text = format!("{path} needs background = true, which allows sub-agents in the background");
    Some(positions.problem(path, text, ProblemKind::RuleViolation))
}

/// What a rollout compares by has to be scored, and a gate must be one of an evaluation.
fn check_rollout(agent: &Agent, positions: &Positions) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut push = |path: String, text: String| {
        problems.push(positions.problem(&path, text, ProblemKind::RuleViolation));
    };
    let known: Vec<&str> = agent.scorers.iter().map(|it| &*it.name).collect();
    let of_rollout = agent.rollout.iter().flat_map(|it| &it.scorers);
    for name in of_rollout.filter(|name| !known.contains(&name.as_str())) {
        let hint = suggestion::did_you_mean(name, known.iter().copied());
        let text = format!(
            "rollout.scorers names \"{name}\", but [[scorers]] has no such scorer{}",
            suggestion::clause(hint)
        );
        push(positions::item("rollout.scorers", name), text);
    }
    let gates = agent.gate.iter().flat_map(|it| &it.gates);
    for gate in gates {
        if let Err(why) = Gate::parse(gate) {
            push(
                positions::item("gate.gates", gate),
                format!("gate.gates: {why}"),
            );
        }
    }
    if agent.gate.is_some() && agent.rollout.is_none() {
        push(
            "gate".to_owned(),
            "gate needs [rollout], which names the candidate".to_owned(),
        );
    }
    problems
}

/// A template needs a schema, which has to describe its values.
fn check_template(agent: &Agent, positions: &Positions) -> Option<Problem> {
    let template = agent.input_template.as_ref()?;
    let checked = match &agent.input_schema {
        Some(schema) => {
            template.check_names(&serde_json::from_str(schema.get()).unwrap_or_default())
        }
        None => Err("needs [input_schema], which describes its values".to_owned()),
    };
    let text = format!("input_template {}", checked.err()?);
    Some(positions.problem("input_template", text, ProblemKind::RuleViolation))
}

/// Models name skills by their directories, so two cannot have the same name.
fn check_skill(agent: &Agent, entry: &str) -> Result<(), String> {
    let name = skill::name_of(entry)?;
    let mut others = agent.skills.iter().filter(|other| *other != entry);
    if let Some(other) = others.find(|other| skill::name_of(other) == Ok(name)) {
        return Err(format!(
            "skills names \"{entry}\" and \"{other}\": two skills cannot have the same name"
        ));
    }
    match agent.skills.len() > MAX_SKILLS {
        true => Err(format!("skills cannot name more than {MAX_SKILLS} skills")),
        false => Ok(()),
    }
}

fn check_tool(tool: &str) -> Result<(), String> {
    if tool == READ_SKILL {
        return Err(format!(
            "tool \"{tool}\" cannot be named in tools config: it is offered when skills names a skill"
        ));
    }
    if IMPLICIT_TOOLS.contains(&tool) {
        return Err(format!(
            "tool \"{tool}\" cannot be named in tools config: it is offered when sub_agents or [subagent] asks for it"
        ));
    }
    if !BUILT_IN_TOOLS.contains(&tool) {
        return Err(format!("unknown tool \"{tool}\" in tools config"));
    }
    Ok(())
}

/// An approval rule for a tool that the agent lacks is a dangerous typo, so it is an error.
fn check_approval(agent: &Agent, tool: &str) -> Result<(), String> {
    let is_available = match tool {
        "call_agent" => !agent.sub_agents.is_empty(),
        "subagent" => agent.subagent.is_some(),
        READ_SKILL => !agent.skills.is_empty(),
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
            None => {
                let mut http_tools = agent.http_tools.iter();
                agent.tools.iter().any(|listed| listed == tool)
                    || http_tools.any(|http_tool| http_tool.name == tool)
            }
        },
    };
    if is_available {
        return Ok(());
    }
    Err(format!(
        "approve names \"{tool}\", which this agent does not have: name a tool of its tools list or of its http_tools, call_agent (with \
         sub_agents), read_skill (with skills), subagent (where it is enabled), or <server>__<tool> of one of its mcp_servers"
    ))
}

/// Returns what is suspicious in a valid file.
pub fn lint(agent: &Agent, own_name: &str, positions: &Positions) -> Vec<Problem> {
    let mut problems = Vec::new();
    let name = &agent.name;
    if own_name != name {
        let text = format!("name is \"{own_name}\", but the file makes it \"{name}\"");
        problems.push(positions.warning("name", text));
    }
    for sub_agent in agent.sub_agents.iter().filter(|name| !is_agent_name(name)) {
        let path = positions::item("sub_agents", sub_agent);
        let text = format!("sub_agents names \"{sub_agent}\", which no agent can be called");
        problems.push(positions.problem(&path, text, ProblemKind::Unusable));
    }
    for glob in &agent.files {
        if context_files::is_outside_workdir(glob) {
            let path = positions::item("files", glob);
            let text =
                format!("files has \"{glob}\", which leads out of the workdir and matches nothing");
            problems.push(positions.problem(&path, text, ProblemKind::Unusable));
        }
    }
    problems
}
