//! Finds why the webhook of an agent's file would get nothing.

use crate::config::Webhooks;
use crate::config::secrets::is_process_secret_set;
use crate::domain::agent::Agent;
use crate::ssrf::{self, SsrfGuard};

/// The warnings, each with the path of its key.
pub fn warnings(agent: &Agent, settings: &Webhooks) -> Vec<(&'static str, String)> {
    let Some(webhook) = &agent.webhook else {
        return Vec::new();
    };
    let url = url_warning(&webhook.url, &settings.guard()).map(|text| ("webhook.url", text));
    let secret_env = webhook.secret_env.as_ref().or(settings.secret_env.as_ref());
    url.into_iter().chain(secret_warning(secret_env)).collect()
}

fn secret_warning(secret_env: Option<&String>) -> Option<(&'static str, String)> {
    match secret_env {
        Some(variable) if is_process_secret_set(variable) => None,
        Some(variable) => {
            let text = format!(
                "the environment variable {variable} with the webhook's secret is not set, so that nothing is sent"
            );
            Some(("webhook.secret_env", text))
        }
        None => {
            let text = "webhook has no secret, so that nothing is sent; set secret_env here, or in [webhooks] of the server's \
                        configuration";
            Some(("webhook", text.to_owned()))
        }
    }
}

/// What every delivery would fail with. A name is not resolved.
fn url_warning(url: &str, guard: &SsrfGuard) -> Option<String> {
    // A URL with errors is an error of the file.
    let url = ssrf::parse_url(url).ok()?;
    let error = guard.check(&url).err()?;
    Some(format!("nothing is sent to webhook.url: {error}"))
}

#[cfg(test)]
mod tests {
    use super::url_warning;
    use crate::ssrf::SsrfGuard;

    #[test]
    fn urls_that_deliveries_refuse_are_found() {
        let guard = SsrfGuard::new(["internal".to_owned()], "[webhooks] allow_hosts");
        let warning = |url| url_warning(url, &guard);
        assert_eq!(
            warning("http://127.0.0.1:1/hook?token=hush").as_deref(),
            Some(
                "nothing is sent to webhook.url: 127.0.0.1 must be reached by https, or be listed in [webhooks] allow_hosts"
            )
        );
        for refused in ["http://example.com/", "https://10.0.0.1/", "https://[::1]/"] {
            assert!(warning(refused).is_some(), "{refused}");
        }
        for fine in ["https://example.com/", "http://internal:8080/", "nonsense"] {
            assert_eq!(warning(fine), None, "{fine}");
        }
    }
}
