//! `url_fetch`: fetches one web page as text. The URL comes from a model, or from a page that the model read, so every
//! request passes the agent's host list and the SSRF guard (`fetch`), and the response is bounded (`content`).

use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use schemars::JsonSchema;
use serde::Deserialize;

use crate::config;
use crate::domain::json_schema::Schema;
use crate::domain::message::{ToolCall, ToolSpec};
use crate::fair::fair_semaphore::{FairSemaphore, Permit};
use crate::ssrf::SsrfGuard;
use crate::tools::web::content::ContentKind;
use crate::tools::web::fetch::{FetchResponse, WebFetcher, https_guard};
use crate::tools::{CallContext, Effect, Tool, ToolOutput};

const NAME: &str = "url_fetch";
const DESCRIPTION: &str = "Fetch a page or file from the web by its http or https address, and get its text: HTML as Markdown, \
                     plain text and JSON as they are. It reaches public hosts only, sends no credentials, and cannot \
                     read images, archives or PDF.";
/// Bytes of a result that are kept free for notices.
const NOTICE_BYTES: usize = 4096;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct UrlFetchArguments {
    /// The whole address, such as `https://example.com/page`.
    url: String,
}

/// Downloads the images and files that requests name by URL: by HTTPS, within the SSRF guard, few at a time.
pub struct AttachmentDownloader {
    fetcher: WebFetcher,
    permits: Arc<FairSemaphore>,
    max_bytes: usize,
}

impl AttachmentDownloader {
    /// Each download has at most `max_bytes` and takes one of the permits.
    pub fn new(config: &config::UrlFetch, max_bytes: usize, permits: Arc<FairSemaphore>) -> Self {
        let fetcher = WebFetcher::https_only(config);
        Self {
            fetcher,
            permits,
            max_bytes,
        }
    }

    /// Downloads a file. `key` is the API key that the run was accepted with.
    ///
    /// # Errors
    /// The text is for readers of the run.
    pub async fn download(&self, url: &str, key: Option<&str>) -> Result<Bytes, String> {
        let _permit = self.permits.acquire(key).await;
        self.fetcher
            .download(url, self.max_bytes)
            .await
            .map(Bytes::from)
    }
}

/// What an [`AttachmentDownloader`] may reach.
pub fn link_guard(config: &config::UrlFetch) -> Arc<SsrfGuard> {
    Arc::new(https_guard(config))
}

struct UrlFetchTool {
    schema: Schema,
    fetcher: WebFetcher,
    permits: Arc<FairSemaphore>,
    /// Most bytes of a page's text in a result.
    max_bytes: usize,
}

/// The tool with its name. Its results have at most `max_result` bytes; each call takes one of the permits.
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
            let permit = context.acquire(&self.permits).await;
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

/// The response as the model reads it.
async fn format_response(
    response: FetchResponse,
    max_bytes: usize,
    permit: Permit,
) -> Result<String, String> {
    let (url, is_redirected) = (response.url.clone(), response.is_redirected);
    let kind = response.content.kind.clone();
    let response = response.into_text(url.as_str(), max_bytes, permit).await?;
    let mut text = response.text;
    if text.is_empty() {
        "(the page holds no text)".clone_into(&mut text);
    }
    if is_redirected {
        text.insert_str(0, &format!("(redirected to {url})\n\n"));
    }
    if response.is_truncated {
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
