//! Fetches the documents that agent files name by URL: under the guard of `url_fetch`, without redirects, within limits on
//! time and size.

use std::sync::Arc;
use std::time::Duration;

use url::Url;

use crate::domain::openapi::document::MAX_DOCUMENT_BYTES;
use crate::ssrf::{self, SsrfGuard, ssrf_client};

/// The longest time of one fetch, during which a reload waits.
const TIMEOUT: Duration = Duration::from_secs(5);
const ACCEPTED_TYPES: &str = "application/json, application/yaml, text/yaml, */*;q=0.1";

/// Fetches a text. Blocking: it waits for a thread of its own, because it may be called on a thread of the runtime.
///
/// # Errors
/// The second half of a sentence that begins with the key.
pub fn fetch(guard: &Arc<SsrfGuard>, url: &Url) -> Result<String, String> {
    let (guard, url) = (Arc::clone(guard), url.clone());
    let work = move || {
        run(async {
            let fetched = tokio::time::timeout(TIMEOUT, fetch_within(&guard, &url)).await;
            let seconds = TIMEOUT.as_secs();
            fetched.unwrap_or_else(|_| Err(format!("did not arrive within {seconds} seconds")))
        })
    };
    let thread = std::thread::Builder::new().name("axed-openapi".to_owned());
    let thread = thread.spawn(work);
    let thread = thread.map_err(|error| format!("could not be fetched: {error}"))?;
    let joined = thread.join();
    joined.unwrap_or_else(|_| Err("could not be fetched".to_owned()))
}

/// Runs the future on a runtime of its own.
fn run(work: impl Future<Output = Result<String, String>>) -> Result<String, String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let runtime = runtime.map_err(|error| format!("could not be fetched: {error}"))?;
    let result = runtime.block_on(work);
    // If it were dropped, it would wait for the system's resolver, which has no limit on time.
    runtime.shutdown_background();
    result
}

async fn fetch_within(guard: &Arc<SsrfGuard>, url: &Url) -> Result<String, String> {
    // The client calls the guard's resolver only for names, so an IP address in the URL is checked here.
    let checked = guard.check(url);
    checked.map_err(|why| format!("cannot be fetched: {why}"))?;
    let client = ssrf_client::client_builder(guard).http1_only().build();
    let client = client.map_err(|error| format!("could not be fetched: {error}"))?;
    let failed = |error: reqwest::Error| {
        let cause = ssrf::root_cause(&error).unwrap_or_else(|| "the connection failed".to_owned());
        format!("could not be fetched: {cause}")
    };
    let request = client.get(url.clone()).header("accept", ACCEPTED_TYPES);
    let mut response = request.send().await.map_err(failed)?;
    let status = response.status();
    if status.is_redirection() {
        return Err(format!(
            "could not be fetched: the answer is {status}, a redirect, which is not followed; name the address that it leads to"
        ));
    }
    if !status.is_success() {
        return Err(format!("could not be fetched: the answer is {status}"));
    }
    let mut bytes = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(failed)? {
        if bytes.len() + chunk.len() > MAX_DOCUMENT_BYTES {
            return Err(format!("has over {MAX_DOCUMENT_BYTES} bytes"));
        }
        bytes.extend_from_slice(&chunk);
    }
    String::from_utf8(bytes).map_err(|_| "is no text in UTF-8".to_owned())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::run;

    #[test]
    fn a_result_does_not_wait_for_the_resolver() {
        let (resolve, resolved) = mpsc::channel::<()>();
        let (send, results) = mpsc::channel();
        let fetch = move || {
            let result = run(async {
                let (start, started) = tokio::sync::oneshot::channel();
                // Resolves a name as slowly as a resolver may.
                drop(tokio::task::spawn_blocking(move || {
                    let _ = start.send(());
                    let _ = resolved.recv();
                }));
                let _ = started.await;
                Err("did not arrive".to_owned())
            });
            let _ = send.send(result);
        };
        let thread = std::thread::spawn(fetch);
        let result = results.recv_timeout(std::time::Duration::from_secs(30));
        drop(resolve);
        assert!(thread.join().is_ok());
        assert_eq!(result, Ok(Err("did not arrive".to_owned())));
    }
}
