//! `url_fetch`: one page of the web as text. The address is a model's choice, and a page's that the model has read: it is
//! asked within the agent's list of hosts and past the guard only (`get`), and what comes back is bounded (`content`).

use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use schemars::JsonSchema;
use serde::Deserialize;

use crate::config;
use crate::domain::message::{ToolCall, ToolSpec};
use crate::domain::schema::Schema;
use crate::fair::turns::{Turn, Turns};
use crate::tools::url_fetch::content::Kind;
use crate::tools::url_fetch::get::{Answer, Web};
use crate::tools::{Context, Effect, Output, Tool};

mod content;
mod get;

/// What models call it by.
const NAME: &str = "url_fetch";
const ABOUT: &str = "Fetch a page or file from the web by its http or https address, and get its text: HTML as Markdown, \
                     plain text and JSON as they are. It reaches public hosts only, sends no credentials, and cannot \
                     read images, archives or PDF.";
/// Most bytes that are shown of an answer that is no success.
const MOST_OF_AN_ERROR: usize = 2000;
/// Room in a result for what is said beside the page.
const ROOM_FOR_NOTICES: usize = 4096;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct UrlFetch {
    /// The whole address, such as `https://example.com/page`.
    url: String,
}

/// Fetches the pictures and files that requests name by URL: by https, within the guard, few at a time.
pub struct Downloads {
    web: Web,
    turns: Arc<Turns>,
    most: usize,
}

impl Downloads {
    /// Of at most `most` bytes each; each waits for one of these turns.
    pub fn new(config: &config::UrlFetch, most: usize, turns: Arc<Turns>) -> Self {
        let web = Web::by_https(config);
        Self { web, turns, most }
    }

    /// The bytes at an address, for a run that was accepted with the key of this name.
    ///
    /// # Errors
    /// Why there are none, in words for the run's reader.
    pub async fn get(&self, url: &str, key: Option<&str>) -> Result<Bytes, String> {
        let _turn = self.turns.take(key).await;
        self.web.download(url, self.most).await.map(Bytes::from)
    }
}

struct Fetch {
    schema: Schema,
    web: Web,
    turns: Arc<Turns>,
    /// Most bytes of a page's text in a result.
    most: usize,
}

/// The tool with its name. Its results hold at most `max_result` bytes; each call waits for one of these turns.
pub fn tool(
    config: &config::UrlFetch,
    max_result: usize,
    turns: Arc<Turns>,
) -> Option<(&'static str, Arc<dyn Tool>)> {
    let schema = Schema::of::<UrlFetch>().ok()?;
    let tool = Fetch {
        schema,
        web: Web::new(config),
        turns,
        most: max_result
            .saturating_sub(ROOM_FOR_NOTICES)
            .max(max_result / 2),
    };
    Some((NAME, Arc::new(tool)))
}

impl Tool for Fetch {
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
            let asked: UrlFetch = call.read()?;
            let turn = self.turns.take(context.key).await;
            let answer = self.web.get(&asked.url, context.allowed_hosts).await?;
            told(answer, self.most, turn).await.map(Output::from)
        })
    }
}

/// What the model reads of an answer.
async fn told(answer: Answer, most: usize, turn: Turn) -> Result<String, String> {
    let Answer {
        url,
        status,
        is_redirected,
        content,
    } = answer;
    let is_success = status.is_success();
    let most = if is_success { most } else { MOST_OF_AN_ERROR };
    let kind = content.kind.clone();
    // Reading a page takes as long as the page is: not on a thread that others wait for.
    let base = url.clone();
    let reading = move || {
        // Held by the reading, which goes on where nobody waits any more.
        let _turn = turn;
        content.read(&base, most)
    };
    let read = tokio::task::spawn_blocking(reading).await;
    let read = read.map_err(|_| "The page could not be read".to_owned())?;
    if !is_success {
        let start = read.map(|(text, _)| text).unwrap_or_default();
        let end = if start.is_empty() { "" } else { ":\n\n" };
        return Err(format!("{url} answered {status}{end}{start}"));
    }
    let (mut text, is_cut) = read.map_err(|why| format!("{url} {why}"))?;
    if text.is_empty() {
        "(the page holds no text)".clone_into(&mut text);
    }
    if is_redirected {
        text.insert_str(0, &format!("(redirected to {url})\n\n"));
    }
    if is_cut {
        let of = if kind == Kind::Html { "page" } else { "file" };
        text.push_str(&format!(
            "\n... (cut: this is the beginning of a longer {of}, and {NAME} cannot get the rest; \
             look for a page about what is missing)"
        ));
    }
    Ok(text)
}
