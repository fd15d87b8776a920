//! `url_fetch`: one page of the web as text. The address is a model's choice, and a page's that the model has read: it is
//! asked within the agent's list of hosts and past the guard only (`get`), and what comes back is bounded (`content`).

use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use schemars::JsonSchema;
use serde::Deserialize;

use crate::config;
use crate::domain::json_schema::Schema;
use crate::domain::message::{ToolCall, ToolSpec};
use crate::fair::fair_semaphore::{FairSemaphore, Permit};
use crate::tools::web::content::ContentKind;
use crate::tools::web::fetch::{FetchResponse, WebFetcher};
use crate::tools::{CallContext, Effect, Tool, ToolOutput};

/// What models call it by.
const NAME: &str = "url_fetch";
const DESCRIPTION: &str = "Fetch a page or file from the web by its http or https address, and get its text: HTML as Markdown, \
                     plain text and JSON as they are. It reaches public hosts only, sends no credentials, and cannot \
                     read images, archives or PDF.";
/// Most bytes that are shown of an answer that is no success.
const MAX_ERROR_BYTES: usize = 2000;
/// Room in a result for what is said beside the page.
const NOTICE_BYTES: usize = 4096;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct UrlFetchArguments {
    /// The whole address, such as `https://example.com/page`.
    url: String,
}

/// Fetches the pictures and files that requests name by URL: by https, within the guard, few at a time.
pub struct AttachmentDownloader {
    fetcher: WebFetcher,
    permits: Arc<FairSemaphore>,
    max_bytes: usize,
}

impl AttachmentDownloader {
    /// Of at most `most` bytes each; each waits for one of these turns.
    pub fn new(config: &config::UrlFetch, max_bytes: usize, permits: Arc<FairSemaphore>) -> Self {
        let fetcher = WebFetcher::https_only(config);
        Self {
            fetcher,
            permits,
            max_bytes,
        }
    }

    /// The bytes at an address, for a run that was accepted with the key of this name.
    ///
    /// # Errors
    /// Why there are none, in words for the run's reader.
    pub async fn download(&self, url: &str, key: Option<&str>) -> Result<Bytes, String> {
        let _permit = self.permits.acquire(key).await;
        self.fetcher
            .download(url, self.max_bytes)
            .await
            .map(Bytes::from)
    }
}

struct UrlFetchTool {
    schema: Schema,
    fetcher: WebFetcher,
    permits: Arc<FairSemaphore>,
    /// Most bytes of a page's text in a result.
    max_bytes: usize,
}

/// The tool with its name. Its results hold at most `max_result` bytes; each call waits for one of these turns.
pub fn tool(
    config: &config::UrlFetch,
    max_result: usize,
    permits: Arc<FairSemaphore>,
) -> Option<(&'static str, Arc<dyn Tool>)> {
    let schema = Schema::for_type::<UrlFetchArguments>().ok()?;
    let tool = UrlFetchTool {
        schema,
        fetcher: WebFetcher::new(config),
        permits,
        max_bytes: max_result.saturating_sub(NOTICE_BYTES).max(max_result / 2),
    };
    Some((NAME, Arc::new(tool)))
}

impl Tool for UrlFetchTool {
    fn spec(&self) -> ToolSpec {
        ToolSpec::new(NAME, DESCRIPTION, self.schema.raw())
    }

    fn effect(&self) -> Effect {
        Effect::ReadOnly
    }

    fn schema(&self) -> Option<&Schema> {
        Some(&self.schema)
    }

    fn call<'a>(
        &'a self,
        call: &'a ToolCall,
        context: CallContext<'a>,
    ) -> BoxFuture<'a, Result<ToolOutput, String>> {
        Box::pin(async move {
            let arguments: UrlFetchArguments = call.parse_arguments()?;
            let permit = self.permits.acquire(context.key).await;
            let response = self
                .fetcher
                .fetch(&arguments.url, context.allowed_hosts)
                .await?;
            format_response(response, self.max_bytes, permit)
                .await
                .map(ToolOutput::from)
        })
    }
}

/// What the model reads of an answer.
async fn format_response(
    response: FetchResponse,
    max_bytes: usize,
    permit: Permit,
) -> Result<String, String> {
    let FetchResponse {
        url,
        status,
        is_redirected,
        content,
    } = response;
    let is_success = status.is_success();
    let max_bytes = if is_success {
        max_bytes
    } else {
        MAX_ERROR_BYTES
    };
    let kind = content.kind.clone();
    // Reading a page takes as long as the page is: not on a thread that others wait for.
    let base = url.clone();
    let convert = move || {
        // Held by the reading, which goes on where nobody waits any more.
        let _permit = permit;
        content.into_text(&base, max_bytes)
    };
    let converted = tokio::task::spawn_blocking(convert).await;
    let converted = converted.map_err(|_| "The page could not be read".to_owned())?;
    if !is_success {
        let start = converted.map(|(text, _)| text).unwrap_or_default();
        let end = if start.is_empty() { "" } else { ":\n\n" };
        return Err(format!("{url} answered {status}{end}{start}"));
    }
    let (mut text, is_truncated) = converted.map_err(|why| format!("{url} {why}"))?;
    if text.is_empty() {
        "(the page holds no text)".clone_into(&mut text);
    }
    if is_redirected {
        text.insert_str(0, &format!("(redirected to {url})\n\n"));
    }
    if is_truncated {
        let noun = if kind == ContentKind::Html {
            "page"
        } else {
            "file"
        };
        text.push_str(&format!(
            "\n... (cut: this is the beginning of a longer {noun}, and {NAME} cannot get the rest; \
             look for a page about what is missing)"
        ));
    }
    Ok(text)
}
