//! Waits for the end of a run of a test.

use std::sync::Arc;

use crate::domain::failure::FailureCode;
use crate::domain::run::Run;
use crate::engine::runner::Runner;

pub async fn wait(runner: &Runner, run: &Run) -> Result<Arc<Run>, String> {
    let ended = runner.wait_until_ended(run.id).await;
    let ended = ended.map_err(|error| error.to_string())?;
    ended.ok_or_else(|| format!("{} is gone", run.id))
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
