//! What must hold of an agent file, whatever its bytes: a definition that survives being stored, or an error that says
//! where to look.

use std::path::Path;

use axed::catalog::LoadError;
use axed::catalog::read::read;
use axed::domain::agent::Agent;
use axed::domain::agent::response_format::ResponseFormat;
use axed::engine::record::agent_snapshots::{self, AgentSnapshots};
use std::sync::Arc;

/// The file as it is named in errors.
pub const FILE: &str = "agents/some.toml";

/// Checks everything that must hold of an agent file with these bytes, and returns what reading it came to.
pub fn check_agent(bytes: &[u8]) -> Result<Agent, LoadError> {
    let read = || read("some", Path::new(FILE), bytes);
    match (read(), read()) {
        (Ok(file), Ok(again)) => {
            let agent = file.agent;
            assert_eq!(debug_text(&agent), debug_text(&again.agent));
            assert_eq!(file.warnings, again.warnings);
            assert_valid(&agent);
            assert_round_trips(agent.clone());
            Ok(agent)
        }
        (Err(invalid), Err(again)) => {
            assert_eq!(
                (&invalid.error, &invalid.problems),
                (&again.error, &again.problems)
            );
            assert!(!invalid.problems.is_empty());
            let error = invalid.error;
            let message = error.to_string();
            assert!(!message.trim().is_empty());
            assert!(message.len() <= 64 << 10, "{} bytes", message.len());
            if message.starts_with("failed to parse agent config") {
                assert!(message.contains("\"some\": agents/some.toml:"), "{message}");
            }
            Err(error)
        }
        (one, other) => panic!("two readings differ: {one:?}, {other:?}"),
    }
}

/// Everything in a definition, as text.
fn debug_text(agent: &Agent) -> String {
    format!("{agent:?}")
}

/// What a run needs of a definition survives a round trip through the record.
fn assert_round_trips(mut agent: Agent) {
    agent.schedules.clear();
    agent.triggers.clear();
    agent.scorers.clear();
    (agent.rollout, agent.gate) = (None, None);
    agent.http_tools.iter_mut().for_each(|tool| tool.table = 0);
    let agent = Arc::new(agent);
    let text = AgentSnapshots::default().agent_json(&agent);
    let Some(back) = agent_snapshots::parse(&text) else {
        panic!("a definition that cannot be read back: {text}");
    };
    assert_eq!(debug_text(&back), debug_text(&agent));
    assert_eq!(AgentSnapshots::default().agent_json(&back), text);
}

/// Every value is within the bounds that the rest of the code relies on.
fn assert_valid(agent: &Agent) {
    assert_eq!(agent.name, "some");
    assert!((1..=50).contains(&agent.limits.max_turns));
    assert!(
        agent
            .delegation
            .max_depth
            .is_none_or(|depth| (1..=5).contains(&depth))
    );
    assert!(agent.timeout.is_none_or(|time| !time.is_zero()));
    for model in std::iter::once(&agent.model).chain(&agent.fallback_models) {
        assert!(!model.provider.trim().is_empty() && !model.model.trim().is_empty());
    }
    for number in [agent.params.temperature, agent.params.top_p]
        .into_iter()
        .flatten()
    {
        assert!(number.is_finite() && number >= 0.0);
    }
    if let ResponseFormat::JsonSchema(schema) = &agent.params.response_format {
        assert!(schema.get().starts_with('{'));
    }
}
