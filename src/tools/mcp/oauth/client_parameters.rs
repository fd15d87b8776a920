//! What a client sends with a request for a token: its secret, and the scopes that it needs.

use secrecy::ExposeSecret;

use crate::config::environment::Environment;
use crate::config::secrets::read_secret;
use crate::domain::mcp_oauth::McpOauth;
use crate::tools::mcp::oauth::challenge::{Challenge, ChallengeKind};
use crate::tools::mcp::oauth::discovery::AuthorizationServer;

/// Most scopes that challenges may add up to.
const MAX_SCOPES: usize = 64;

/// The scopes to request: those of the file, or those that the server needs; with those that it demands now.
pub fn next_scopes(
    settings: &McpOauth,
    requested: &[String],
    challenge: &Challenge,
    server: &AuthorizationServer,
) -> Result<Vec<String>, String> {
    let mut scopes = match (requested.is_empty(), settings.scopes.is_empty()) {
        (false, _) => requested.to_vec(),
        (true, false) => settings.scopes.clone(),
        (true, true) if !challenge.scopes.is_empty() => challenge.scopes.clone(),
        (true, true) => server.resource_scopes.clone(),
    };
    if challenge.kind == ChallengeKind::InsufficientScope {
        let missing = challenge.scopes.iter();
        let missing = missing.filter(|it| !scopes.contains(it)).cloned();
        let missing: Vec<String> = missing.collect();
        if missing.is_empty() || scopes.len() + missing.len() > MAX_SCOPES {
            let needed = challenge.scopes.join(" ");
            return Err(format!(
                "the token has the scopes \"{}\", and the server demands \"{needed}\"",
                scopes.join(" ")
            ));
        }
        scopes.extend(missing);
    }
    Ok(scopes)
}

/// The client's secret as the environment or its file has it now.
pub async fn read_client_secret(
    settings: &McpOauth,
    environment: &Environment,
) -> Result<Option<String>, String> {
    let Some(variable) = settings.client_secret_env.clone() else {
        return Ok(None);
    };
    let (environment, name) = (environment.clone(), variable.clone());
    let read = move || read_secret(&environment, &name);
    let secret = tokio::task::spawn_blocking(read).await;
    let secret = secret.map_err(|error| error.to_string())?;
    let secret = secret.map_err(|error| error.to_string())?;
    let secret = secret.ok_or_else(|| {
        format!("its oauth.client_secret_env needs the variable {variable}, which the daemon's environment does not have")
    })?;
    Ok(Some(secret.expose_secret().trim().to_owned()))
}
