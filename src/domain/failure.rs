//! Why a run failed.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Why a run failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "RunError")]
pub struct Failure {
    /// The kind of the failure; for programs.
    pub code: FailureCode,
    /// What failed; for people. Contains no secrets.
    pub message: String,
    /// The provider's error category, or `timeout`, `config`, `budget`, `agent`, `internal`.
    pub category: String,
    /// Whether the same request may succeed later. False if a call was interrupted that is not safe to repeat, or may be.
    pub retryable: bool,
}

/// Identifies the kind of a failure. Codes do not change between versions; later versions may add codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "RunErrorCode")]
pub enum FailureCode {
    /// The agent's definition is invalid, or the prompt could not be assembled.
    Config,
    /// The provider rejected the API key.
    ProviderAuth,
    /// The provider rejected the request.
    ProviderBadRequest,
    /// The provider's rate limit was reached.
    ProviderRateLimit,
    /// The provider is overloaded.
    ProviderOverloaded,
    /// The provider failed or could not be reached.
    ProviderServer,
    /// The deadline passed.
    Timeout,
    /// The run needed more turns than its agent allows.
    MaxTurns,
    /// A budget is spent.
    BudgetExceeded,
    /// The model repeated the same calls with the same results.
    LoopDetected,
    /// The final text does not match the requested format.
    OutputInvalid,
    /// The reply reached its token limit before any text or tool call.
    OutputTruncated,
    /// The model refused to answer.
    Refused,
    /// The daemon stopped during the run.
    Interrupted,
    /// A run of an evaluation, or a run below it, called a tool that the evaluation does not perform.
    Diverged,
    /// No node has the labels that the run needs.
    NoNode,
    /// An error of the daemon.
    Internal,
}

impl FailureCode {
    pub const ALL: [Self; 17] = [
        Self::Config,
        Self::ProviderAuth,
        Self::ProviderBadRequest,
        Self::ProviderRateLimit,
        Self::ProviderOverloaded,
        Self::ProviderServer,
        Self::Timeout,
        Self::MaxTurns,
        Self::BudgetExceeded,
        Self::LoopDetected,
        Self::OutputInvalid,
        Self::OutputTruncated,
        Self::Refused,
        Self::Interrupted,
        Self::Diverged,
        Self::NoNode,
        Self::Internal,
    ];
}

/// As in JSON.
impl fmt::Display for FailureCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}
