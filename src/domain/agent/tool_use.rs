//! What the runs of an evaluation do with calls of tools.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::settings::choice::choice;

choice! {
    /// What the runs of an evaluation do with calls of tools.
    pub enum ToolUse {
        /// Tools are offered; a call is a divergence and ends the case. Other agents are called.
        None = "none",
        /// A call that the record of the case's run has gets the recorded result.
        Recorded = "recorded",
        /// Tools are executed.
        Live = "live",
    }
}

/// What happens to a call that the record does not have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum UnknownCalls {
    /// It is a divergence and ends the case.
    #[default]
    Stop,
    /// It is performed if it only reads, else as [`UnknownCalls::Stop`].
    Safe,
    /// This agent makes up the result.
    Agent(String),
}

const AGENT_PREFIX: &str = "agent:";

impl fmt::Display for UnknownCalls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stop => f.write_str("stop"),
            Self::Safe => f.write_str("safe"),
            Self::Agent(name) => write!(f, "{AGENT_PREFIX}{name}"),
        }
    }
}

impl FromStr for UnknownCalls {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.strip_prefix(AGENT_PREFIX)) {
            ("stop", _) => Ok(Self::Stop),
            ("safe", _) => Ok(Self::Safe),
            (_, Some(name)) if !name.is_empty() => Ok(Self::Agent(name.to_owned())),
            _ => Err("must be stop, safe or agent:NAME".to_owned()),
        }
    }
}

impl From<UnknownCalls> for String {
    fn from(unknown: UnknownCalls) -> Self {
        unknown.to_string()
    }
}

impl TryFrom<String> for UnknownCalls {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// What the tree of a root that an evaluation has started does with calls of tools. Recorded with the root's definition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvalTools {
    pub tools: ToolUse,
    #[serde(default)]
    pub unknown: UnknownCalls,
    /// Regular expressions of what makes no difference in the arguments of calls.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ignore: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::UnknownCalls;

    #[test]
    fn unknown_calls_are_read_as_they_are_written() {
        for text in ["stop", "safe", "agent:clerk"] {
            let read: UnknownCalls = text.parse().expect("valid");
            assert_eq!(read.to_string(), text);
        }
        assert!("agent:".parse::<UnknownCalls>().is_err());
        assert!("live".parse::<UnknownCalls>().is_err());
    }
}
