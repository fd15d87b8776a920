//! What must hold of an agent file, whatever its bytes: a definition that survives being stored, or an error that says
//! where to look.

use std::path::Path;

use axed::catalog::LoadError;
use axed::catalog::read::read;
use axed::domain::agent::{Agent, ResponseFormat};
use axed::engine::definitions::{self, Definitions};
use std::sync::Arc;

/// The file as it is named in errors.
pub const FILE: &str = "agents/some.toml";

/// Checks everything that must hold of an agent file with these bytes, and returns what reading it came to.
pub fn check_agent(bytes: &[u8]) -> Result<Agent, LoadError> {
    let read = || read("some", Path::new(FILE), bytes);
    match (read(), read()) {
        (Ok((agent, warnings)), Ok((again, warned))) => {
            assert_eq!(written(&agent), written(&again));
            assert_eq!(warnings, warned);
            is_sound(&agent);
            comes_back(agent.clone());
            Ok(agent)
        }
        (Err(error), Err(again)) => {
            assert_eq!(error, again);
            let told = error.to_string();
            assert!(!told.trim().is_empty());
            assert!(told.len() <= 64 << 10, "{} bytes", told.len());
            if told.starts_with("failed to parse agent config") {
                assert!(told.contains("\"some\": agents/some.toml:"), "{told}");
            }
            Err(error)
        }
        (one, other) => panic!("two readings differ: {one:?}, {other:?}"),
    }
}

/// Everything in a definition, as text.
fn written(agent: &Agent) -> String {
    format!("{agent:?}")
}

/// A definition goes through the record as it is.
fn comes_back(agent: Agent) {
    let agent = Arc::new(agent);
    let text = Definitions::default().text(&agent);
    let Some(back) = definitions::read(&text) else {
        panic!("a definition that cannot be read back: {text}");
    };
    assert_eq!(written(&back), written(&agent));
    assert_eq!(Definitions::default().text(&back), text);
}

/// Every value is within the bounds that the rest of the house counts on.
fn is_sound(agent: &Agent) {
    assert_eq!(agent.name, "some");
    assert!((1..=50).contains(&agent.max_turns));
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
