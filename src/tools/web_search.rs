//! `web_search`: asks the one search service that the configuration names. Its address is the operator's own choice, so it
//! is asked wherever it is; its key goes nowhere else.

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
use crate::domain::message::{ToolCall, ToolSpec, shorten};
use crate::domain::schema::Schema;
use crate::fair::turns::Turns;
use crate::tools::html;
use crate::tools::{Context, Effect, Output, Tool};

/// What models call it by.
const NAME: &str = "web_search";
const ABOUT: &str = "Search the web. Gives up to ten results, each with its title, address and a short text. To read a \
                     page, fetch its address with url_fetch, where that is offered.";
/// Where Brave's API wants its key (api-dashboard.search.brave.com).
const BRAVE_KEY: HeaderName = HeaderName::from_static("x-subscription-token");
/// Most results that are told.
const MOST_RESULTS: usize = 10;
/// Most characters of a result's title, address and text.
const MOST_TITLE: usize = 200;
const MOST_ADDRESS: usize = 1000;
const MOST_TEXT: usize = 600;
/// Most bytes of the service's answer.
const MOST_BYTES: usize = 2 << 20;
const CONNECT: Duration = Duration::from_secs(10);

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct WebSearch {
    /// What to look for, in a few words.
    #[schemars(length(min = 1, max = 400))]
    query: String,
}

struct Search {
    schema: Schema,
    service: config::WebSearch,
    /// Made when it is first needed: it reads the system's certificates.
    client: OnceLock<Result<Client, String>>,
    turns: Arc<Turns>,
}

/// The tool with its name; none where no service is configured. Each call waits for one of these turns.
pub fn tool(
    service: Option<&config::WebSearch>,
    turns: Arc<Turns>,
) -> Option<(&'static str, Arc<dyn Tool>)> {
    let schema = Schema::of::<WebSearch>().ok()?;
    let tool = Search {
        schema,
        service: service?.clone(),
        client: OnceLock::new(),
        turns,
    };
    Some((NAME, Arc::new(tool)))
}

impl Tool for Search {
    fn spec(&self) -> ToolSpec {
        ToolSpec::new(NAME, ABOUT, self.schema.raw())
    }

    fn effect(&self) -> Effect {
        Effect::Reads
    }

    fn schema(&self) -> Option<&Schema> {
        Some(&self.schema)
    }

    fn perform<'a>(
        &'a self,
        call: &'a ToolCall,
        context: Context<'a>,
    ) -> BoxFuture<'a, Result<Output, String>> {
        Box::pin(async move {
            let asked: WebSearch = call.read()?;
            let turn = self.turns.take(context.key).await;
            let timeout = self.service.timeout;
            let body = tokio::time::timeout(timeout, self.search(&asked.query)).await;
            let body = body.map_err(|_| {
                let seconds = timeout.as_secs();
                format!("The search service did not answer within {seconds} seconds")
            })??;
            let kind = self.service.kind;
            // Its texts are those of strangers, and reading them takes as long as they are.
            let reading = move || {
                let _turn = turn;
                let found = found(kind, &body)?;
                Ok(listed(&asked.query, &found).into())
            };
            let read = tokio::task::spawn_blocking(reading).await;
            read.unwrap_or_else(|_| Err("The search service's answer could not be read".to_owned()))
        })
    }
}

/// One result, as the service has it.
struct Found {
    title: String,
    url: String,
    text: String,
}

impl Search {
    async fn search(&self, query: &str) -> Result<Vec<u8>, String> {
        let response = self.ask(query)?.send().await.map_err(|it| unreached(&it))?;
        let status = response.status();
        if !status.is_success() {
            return Err(format!("The search service answered {status}"));
        }
        read(response).await
    }

    fn ask(&self, query: &str) -> Result<RequestBuilder, String> {
        let mut url = Url::parse(self.service.url.expose_secret())
            .map_err(|why| format!("The search service's url is no URL ({why})"))?;
        url.query_pairs_mut().append_pair("q", query);
        match self.service.kind {
            SearchKind::Searxng => url.query_pairs_mut().append_pair("format", "json"),
            SearchKind::Brave => url
                .query_pairs_mut()
                .append_pair("count", &MOST_RESULTS.to_string()),
        };
        let client = self.client.get_or_init(connector);
        let mut request = client
            .as_ref()
            .map_err(Clone::clone)?
            .get(url)
            .header(USER_AGENT, concat!("axed/", env!("CARGO_PKG_VERSION")))
            .header(ACCEPT, "application/json");
        if let Some((name, value)) = self.key()? {
            request = request.header(name, value);
        }
        Ok(request)
    }

    /// The header with the key; none where the service needs none.
    fn key(&self) -> Result<Option<(HeaderName, HeaderValue)>, String> {
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
            SearchKind::Brave => (BRAVE_KEY, key.to_owned()),
        };
        let mut value = HeaderValue::from_str(&value)
            .map_err(|_| format!("{variable} holds characters that no key has"))?;
        value.set_sensitive(true);
        Ok(Some((name, value)))
    }
}

fn connector() -> Result<Client, String> {
    Client::builder()
        // A redirect would take the key with it.
        .redirect(reqwest::redirect::Policy::none())
        .http1_only()
        .connect_timeout(CONNECT)
        .pool_max_idle_per_host(4)
        .pool_idle_timeout(Duration::from_secs(30))
        .build()
        .map_err(|error| format!("{NAME} has no HTTP client: {error}"))
}

async fn read(mut response: Response) -> Result<Vec<u8>, String> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|it| unreached(&it))? {
        if body.len() + chunk.len() > MOST_BYTES {
            return Err(format!(
                "The search service's answer is longer than {MOST_BYTES} bytes"
            ));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// The results in an answer of this kind of service.
fn found(kind: SearchKind, body: &[u8]) -> Result<Vec<Found>, String> {
    match kind {
        SearchKind::Searxng => json::<Searxng>(body).map(Searxng::found),
        SearchKind::Brave => json::<Brave>(body).map(Brave::found),
    }
}

fn json<T: DeserializeOwned>(body: &[u8]) -> Result<T, String> {
    serde_json::from_slice(body).map_err(|error| {
        // The error's own text may quote what stands there.
        let (line, column) = (error.line(), error.column());
        format!(
            "The search service's answer is not what it should be (line {line}, column {column})"
        )
    })
}

/// The innermost cause: the outer ones name the address, whose query may hold a secret.
fn unreached(error: &reqwest::Error) -> String {
    let mut cause: &(dyn Error + 'static) = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    match cause.is::<reqwest::Error>() {
        true => "No answer from the search service".to_owned(),
        false => format!("No answer from the search service: {cause}"),
    }
}

/// What SearXNG's search API answers with `format=json` (docs.searxng.org/dev/search_api.html).
#[derive(Deserialize)]
struct Searxng {
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

impl Searxng {
    fn found(self) -> Vec<Found> {
        let found = |it: SearxngResult| Found {
            title: it.title.unwrap_or_default(),
            url: it.url,
            text: it.content.unwrap_or_default(),
        };
        let first = self.results.into_iter().take(MOST_RESULTS);
        first.map(found).collect()
    }
}

/// What Brave's web search answers; without `web` where nothing was found.
#[derive(Deserialize)]
struct Brave {
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

impl Brave {
    fn found(self) -> Vec<Found> {
        // Found words are marked in HTML.
        let plain = |text: Option<String>| {
            let text = text.unwrap_or_default();
            html::to_markdown(&text, None, 4 * MOST_TEXT).0
        };
        let found = |it: BraveResult| Found {
            title: plain(it.title),
            url: it.url,
            text: plain(it.description),
        };
        let results = self.web.map(|web| web.results).unwrap_or_default();
        let first = results.into_iter().take(MOST_RESULTS);
        first.map(found).collect()
    }
}

/// The results as the model reads them.
fn listed(query: &str, found: &[Found]) -> String {
    if found.is_empty() {
        return format!("Nothing was found for {query:?}.");
    }
    let line = |text: &str, most| {
        let words: Vec<&str> = text.split_whitespace().collect();
        shorten(&words.join(" "), most)
    };
    let mut text = String::new();
    for (at, result) in found.iter().enumerate() {
        let (title, url) = (
            line(&result.title, MOST_TITLE),
            line(&result.url, MOST_ADDRESS),
        );
        text.push_str(&format!("{}. {title}\n   {url}\n", at + 1));
        let about = line(&result.text, MOST_TEXT);
        if !about.is_empty() {
            text.push_str(&format!("   {about}\n"));
        }
    }
    text
}
