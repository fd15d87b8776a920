//! Waits for the end of a run of a test.

use std::sync::Arc;
use std::time::Duration;

use crate::domain::failure::FailureCode;
use crate::domain::run::Run;
use crate::engine::runner::Runner;

/// How long one look at a run waits for its end.
const WAIT: Duration = Duration::from_secs(3600);

pub async fn wait(runner: &Runner, run: &Run) -> Result<Arc<Run>, String> {
    loop {
        match runner.wait(run.id, WAIT).await {
            Ok(Some(run)) if run.status.is_terminal() => return Ok(run),
            Ok(Some(_)) => {}
            Ok(None) => return Err(format!("{} is gone", run.id)),
            Err(error) => return Err(error.to_string()),
        }
    }
}

/// The error of the provider that the run failed with.
pub fn provider_failure(run: &Run) -> Option<String> {
    let error = run.error.as_ref()?;
    let is_providers = matches!(
        error.code,
        FailureCode::ProviderAuth
            | FailureCode::ProviderBadRequest
            | FailureCode::ProviderRateLimit
            | FailureCode::ProviderOverloaded
            | FailureCode::ProviderServer
    );
    is_providers.then(|| error.message.clone())
}
