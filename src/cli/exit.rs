//! Exit codes, which scripts rely on: 0 success; 1 the run ended badly; 2 not found, invalid input or configuration;
//! 3 provider failure, missing key or timeout; 4 budget exceeded. And what to do about an error.

use std::io::{self, ErrorKind};
use std::path::Path;

use crate::cli::client::ClientError;
use crate::config::load::ConfigError;
use crate::domain::failure::FailureCode;
use crate::domain::run::Status;
use crate::providers::registry::RegistryError;
use crate::settings::suggestion;

/// A missing or invalid thing that the user named: exit code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct InvalidInput(pub String);

impl InvalidInput {
    /// A file that the user named and that cannot be read, with the one that was perhaps meant.
    pub fn unreadable(path: &Path, error: &io::Error) -> Self {
        let hint = match error.kind() {
            ErrorKind::NotFound => suggestion::similar_file(path),
            _ => None,
        };
        let hint = suggestion::clause(hint);
        Self(format!("could not read {}: {error}{hint}", path.display()))
    }
}

pub fn code_for_error(error: &anyhow::Error) -> u8 {
    for cause in error.chain() {
        if cause.is::<ConfigError>() || cause.is::<RegistryError>() || cause.is::<InvalidInput>() {
            return 2;
        }
        if let Some(error) = cause.downcast_ref() {
            return code_for_client_error(error);
        }
    }
    1
}

/// What the user can do next, if the error itself does not say it.
pub fn hint_for_error(error: &anyhow::Error) -> Option<&'static str> {
    let client_error = error.chain().find_map(|cause| cause.downcast_ref())?;
    match client_error {
        ClientError::Unreachable { .. } => {
            Some("start one with axed serve, or name another with --server or AXED_SERVER")
        }
        ClientError::ErrorResponse { status: 401, .. } => {
            Some("set AXED_KEY to a key of the daemon; axed keys new makes one")
        }
        ClientError::ErrorResponse { code, .. } if code == "agent_not_found" => Some(
            "axed agents list shows the agents of the files here, GET /agents those of a daemon; axed agents init NAME writes a new one",
        ),
        ClientError::ErrorResponse { code, .. } if code == "run_not_found" => {
            Some("axed runs list --all lists them")
        }
        _ => None,
    }
}

pub fn code_for_run(status: Status, failure: Option<FailureCode>) -> u8 {
    match (status, failure) {
        (Status::Completed, _) => 0,
        (_, None) => 1,
        (_, Some(code)) => match code {
            FailureCode::MaxTurns
            | FailureCode::LoopDetected
            | FailureCode::OutputInvalid
            | FailureCode::OutputTruncated
            | FailureCode::Refused
            | FailureCode::ProviderBadRequest
            | FailureCode::Interrupted
            | FailureCode::Diverged
            | FailureCode::Internal => 1,
            FailureCode::Config => 2,
            FailureCode::NoNode
            | FailureCode::ProviderAuth
            | FailureCode::ProviderRateLimit
            | FailureCode::ProviderOverloaded
            | FailureCode::ProviderServer
            | FailureCode::Timeout => 3,
            FailureCode::BudgetExceeded => 4,
        },
    }
}

fn code_for_client_error(error: &ClientError) -> u8 {
    match error {
        ClientError::Url { .. } | ClientError::Key | ClientError::KeyFile(_) => 2,
        ClientError::Unreachable { .. } => 3,
        ClientError::NotReady(_) | ClientError::InvalidResponse { .. } => 1,
        // The contract's text for a missing provider key; code 3, as for a key that the provider rejects.
        ClientError::ErrorResponse { detail, .. } if detail.starts_with("API key for provider") => {
            3
        }
        ClientError::ErrorResponse { status, .. } => match status {
            400 | 404 | 405 | 409 | 413 | 415 | 422 => 2,
            401 | 403 | 408 | 429 | 502 | 503 => 3,
            _ => 1,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::{InvalidInput, code_for_error, code_for_run};
    use crate::cli::client::ClientError;
    use crate::config::load::ConfigError;
    use crate::domain::failure::FailureCode;
    use crate::domain::run::Status;

    #[test]
    fn exit_codes_match_the_contract() {
        assert_eq!(code_for_run(Status::Completed, None), 0);
        assert_eq!(code_for_run(Status::Cancelled, None), 1);
        for (failure, code) in [
            (FailureCode::MaxTurns, 1),
            (FailureCode::OutputTruncated, 1),
            (FailureCode::Refused, 1),
            (FailureCode::ProviderBadRequest, 1),
            (FailureCode::Config, 2),
            (FailureCode::ProviderAuth, 3),
            (FailureCode::Timeout, 3),
            (FailureCode::BudgetExceeded, 4),
        ] {
            assert_eq!(
                code_for_run(Status::Failed, Some(failure)),
                code,
                "{failure:?}"
            );
        }
    }

    #[test]
    fn errors_are_found_beneath_their_context() {
        let error_response = |status, detail: &str| {
            anyhow::Error::new(ClientError::ErrorResponse {
                status,
                code: String::new(),
                detail: detail.to_owned(),
            })
            .context("running x")
        };
        let missing = "API key for provider \"openai\" is not configured (set OPENAI_API_KEY or add to config.toml)";
        assert_eq!(
            code_for_error(&error_response(404, "agent config not found: x")),
            2
        );
        assert_eq!(code_for_error(&error_response(422, missing)), 3);
        assert_eq!(code_for_error(&error_response(401, "this needs a key")), 3);
        assert_eq!(
            code_for_error(&error_response(503, "the daemon is stopping")),
            3
        );
        let config = anyhow::Error::new(ConfigError("x".to_owned())).context("y");
        assert_eq!(code_for_error(&config), 2);
        assert_eq!(code_for_error(&InvalidInput("x".to_owned()).into()), 2);
        assert_eq!(code_for_error(&anyhow::anyhow!("the port is taken")), 1);
    }
}
