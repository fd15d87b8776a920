//! `web_search`: queries the configured search service. The operator chooses its URL, so the SSRF guard does not apply.
//! Its key is sent nowhere else.

use std::error::Error;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::future::BoxFuture;
use http::header::{ACCEPT, AUTHORIZATION, HeaderName, HeaderValue, USER_AGENT};
use reqwest::{Client, RequestBuilder, Response};
use schemars::JsonSchema;
use secrecy::ExposeSecret;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use url::Url;

use crate::config::{self, SearchKind};
use crate::domain::json_schema::Schema;
use crate::domain::message::{ToolCall, ToolSpec, shorten};
use crate::fair::fair_semaphore::FairSemaphore;
use crate::tools::web::html;
use crate::tools::{CallContext, Effect, Tool, ToolOutput};

pub const NAME: &str = "web_search";
const DESCRIPTION: &str = "Search the web. Gives up to ten results, each with its title, address and a short text. To read a \
                     page, fetch its address with url_fetch, where that is offered.";
/// Where Brave's API expects its key (api-dashboard.search.brave.com).
const BRAVE_KEY_HEADER: HeaderName = HeaderName::from_static("x-subscription-token");
const MAX_RESULTS: usize = 10;
const MAX_TITLE_CHARS: usize = 200;
const MAX_URL_CHARS: usize = 1000;
const MAX_SNIPPET_CHARS: usize = 600;
const MAX_RESPONSE_BYTES: usize = 2 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct WebSearchArguments {
    /// What to look for, in a few words.
    #[schemars(length(min = 1, max = 400))]
    query: String,
}

struct WebSearchTool {
    schema: Schema,
    service: config::WebSearch,
    /// Built on first use, because that reads the system's certificates.
    client: OnceLock<Result<Client, String>>,
    permits: Arc<FairSemaphore>,
}

/// The tool with its name; `None` if no service is configured. Each call takes one of the permits.
pub fn tool(
    service: Option<&config::WebSearch>,
    permits: Arc<FairSemaphore>,
) -> Option<(&'static str, Arc<dyn Tool>)> {
    let schema = Schema::for_type::<WebSearchArguments>().ok()?;
    let tool = WebSearchTool {
        schema,
        service: service?.clone(),
        client: OnceLock::new(),
        permits,
    };
    Some((NAME, Arc::new(tool)))
}

impl Tool for WebSearchTool {
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
            let arguments: WebSearchArguments = call.parse_arguments()?;
            let permit = context.acquire(&self.permits).await;
            let timeout = self.service.timeout;
            let body = tokio::time::timeout(timeout, self.search(&arguments.query)).await;
            let body = body.map_err(|_| {
                let seconds = timeout.as_secs();
                format!("The search service did not answer within {seconds} seconds")
            })??;
            let kind = self.service.kind;
            // The results come from strangers, and parsing them takes time in proportion to their length.
            let parse = move || {
                let _permit = permit;
                let results = parse_results(kind, &body)?;
                Ok(format_results(&arguments.query, &results).into())
            };
            let parsed = tokio::task::spawn_blocking(parse).await;
            parsed
                .unwrap_or_else(|_| Err("The search service's answer could not be read".to_owned()))
        })
    }
}

struct SearchResult {
    title: String,
    url: String,
    snippet: String,
}

impl WebSearchTool {
    async fn search(&self, query: &str) -> Result<Vec<u8>, String> {
        let response = self
            .build_request(query)?
            .send()
            .await
            .map_err(|it| connection_error_message(&it))?;
        let status = response.status();
        if !status.is_success() {
            return Err(format!("The search service answered {status}"));
        }
        read_body(response).await
    }

    fn build_request(&self, query: &str) -> Result<RequestBuilder, String> {
        let mut url = Url::parse(self.service.url.expose_secret())
            .map_err(|why| format!("The search service's url is not a URL ({why})"))?;
        url.query_pairs_mut().append_pair("q", query);
        match self.service.kind {
            SearchKind::Searxng => url.query_pairs_mut().append_pair("format", "json"),
            SearchKind::Brave => url
                .query_pairs_mut()
                .append_pair("count", &MAX_RESULTS.to_string()),
        };
        let client = self.client.get_or_init(build_client);
        let mut request = client
            .as_ref()
            .map_err(Clone::clone)?
            .get(url)
            .header(USER_AGENT, concat!("axed/", env!("CARGO_PKG_VERSION")))
            .header(ACCEPT, "application/json");
        if let Some((name, value)) = self.auth_header()? {
            request = request.header(name, value);
        }
        Ok(request)
    }

    /// The header with the key; `None` if the service needs none.
    fn auth_header(&self) -> Result<Option<(HeaderName, HeaderValue)>, String> {
        let Some(variable) = &self.service.api_key_env else {
            return Ok(None);
        };
        let Some(key) = &self.service.api_key else {
            return Err(format!(
                "The search service's key is not configured (the operator has to set {variable})"
            ));
        };
        let key = key.expose_secret();
        let (name, value) = match self.service.kind {
            SearchKind::Searxng => (AUTHORIZATION, format!("Bearer {key}")),
            SearchKind::Brave => (BRAVE_KEY_HEADER, key.to_owned()),
        };
        let mut value = HeaderValue::from_str(&value)
            .map_err(|_| format!("{variable} holds characters that no key has"))?;
        value.set_sensitive(true);
        Ok(Some((name, value)))
    }
}

fn build_client() -> Result<Client, String> {
    Client::builder()
        // A redirect would forward the key.
        .redirect(reqwest::redirect::Policy::none())
        .http1_only()
        .connect_timeout(CONNECT_TIMEOUT)
        .pool_max_idle_per_host(4)
        .pool_idle_timeout(Duration::from_secs(30))
        .build()
        .map_err(|error| format!("{NAME} has no HTTP client: {error}"))
}

async fn read_body(mut response: Response) -> Result<Vec<u8>, String> {
    let mut body = Vec::new();
    while let Some(chunk) = response
        .chunk()
        .await
        .map_err(|it| connection_error_message(&it))?
    {
        if body.len() + chunk.len() > MAX_RESPONSE_BYTES {
            return Err(format!(
                "The search service's answer is longer than {MAX_RESPONSE_BYTES} bytes"
            ));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

fn parse_results(kind: SearchKind, body: &[u8]) -> Result<Vec<SearchResult>, String> {
    match kind {
        SearchKind::Searxng => {
            parse_json::<SearxngResponse>(body).map(SearxngResponse::into_results)
        }
        SearchKind::Brave => parse_json::<BraveResponse>(body).map(BraveResponse::into_results),
    }
}

fn parse_json<T: DeserializeOwned>(body: &[u8]) -> Result<T, String> {
    serde_json::from_slice(body).map_err(|error| {
        // The error's own text may quote the response.
        let (line, column) = (error.line(), error.column());
        format!(
            "The search service's answer is not what it should be (line {line}, column {column})"
        )
    })
}

/// The innermost cause. The outer ones contain the URL, whose query may hold a secret.
fn connection_error_message(error: &reqwest::Error) -> String {
    let mut cause: &(dyn Error + 'static) = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    match cause.is::<reqwest::Error>() {
        true => "No answer from the search service".to_owned(),
        false => format!("No answer from the search service: {cause}"),
    }
}

/// The response of SearXNG's search API with `format=json` (docs.searxng.org/dev/search_api.html).
#[derive(Deserialize)]
struct SearxngResponse {
    results: Vec<SearxngResult>,
}

#[derive(Deserialize)]
struct SearxngResult {
    #[serde(default)]
    title: Option<String>,
    url: String,
    #[serde(default)]
    content: Option<String>,
}

impl SearxngResponse {
    fn into_results(self) -> Vec<SearchResult> {
        let to_result = |it: SearxngResult| SearchResult {
            title: it.title.unwrap_or_default(),
            url: it.url,
            snippet: it.content.unwrap_or_default(),
        };
        let first = self.results.into_iter().take(MAX_RESULTS);
        first.map(to_result).collect()
    }
}

/// The response of Brave's web search; without `web` if nothing was found.
#[derive(Deserialize)]
struct BraveResponse {
    #[serde(default)]
    web: Option<BraveWeb>,
}

#[derive(Deserialize)]
struct BraveWeb {
    #[serde(default)]
    results: Vec<BraveResult>,
}

#[derive(Deserialize)]
struct BraveResult {
    #[serde(default)]
    title: Option<String>,
    url: String,
    #[serde(default)]
    description: Option<String>,
}

impl BraveResponse {
    fn into_results(self) -> Vec<SearchResult> {
        // Matching words are marked in HTML.
        let plain = |text: Option<String>| {
            let text = text.unwrap_or_default();
            html::to_markdown(&text, None, 4 * MAX_SNIPPET_CHARS).0
        };
        let to_result = |it: BraveResult| SearchResult {
            title: plain(it.title),
            url: it.url,
            snippet: plain(it.description),
        };
        let results = self.web.map(|web| web.results).unwrap_or_default();
        let first = results.into_iter().take(MAX_RESULTS);
        first.map(to_result).collect()
    }
}

fn format_results(query: &str, results: &[SearchResult]) -> String {
    if results.is_empty() {
        return format!("Nothing was found for {query:?}.");
    }
    let line = |text: &str, max_chars| {
        let words: Vec<&str> = text.split_whitespace().collect();
        shorten(&words.join(" "), max_chars)
    };
    let mut text = String::new();
    for (index, result) in results.iter().enumerate() {
        let (title, url) = (
            line(&result.title, MAX_TITLE_CHARS),
            line(&result.url, MAX_URL_CHARS),
        );
        text.push_str(&format!("{}. {title}\n   {url}\n", index + 1));
        let snippet = line(&result.snippet, MAX_SNIPPET_CHARS);
        if !snippet.is_empty() {
            text.push_str(&format!("   {snippet}\n"));
        }
    }
    text
}
