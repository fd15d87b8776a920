//! Scripted provider: canned replies from files, for demos and for tests of agents.
//!
//! A script is a TOML file: `<model>.toml` holds the replies of `<provider>/<model>`. `docs/agents/scripts.md` documents the format.
//! The conversation alone determines the reply, so the reply is the same in every process and with any number of concurrent
//! runs. The only state is a count of raised errors per conversation.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde::Serialize;

use crate::domain::content::estimate_tokens;
use crate::domain::message::{AssistantMessage, Message, ToolCall, ToolResult, ToolSpec};
use crate::domain::usage::TokenUsage;
use crate::providers::scripted::script::{Reply, Script, ScriptError};
use crate::providers::scripted::template::{TemplateContext, TemplateError};
use crate::providers::{
    ChatRequest, Delta, ErrorCategory, Provider, ProviderError, SentRequest, wire_json,
};

pub mod script;
mod template;

/// Maximum number of conversations with a count of raised errors.
const MAX_COUNTED_CONVERSATIONS: usize = 10_000;

pub struct ScriptedProvider {
    name: String,
    /// By model name.
    scripts: BTreeMap<String, Script>,
    /// How many errors each conversation has received for its current reply, by fingerprint.
    error_counts: Mutex<HashMap<u64, u32>>,
}

impl ScriptedProvider {
    /// Reads all scripts. A path is a file, or a directory whose `*.toml` files are read, without subdirectories. `name` is
    /// the provider's name.
    pub fn load(name: &str, scripts: &[PathBuf]) -> Result<Self, ScriptError> {
        let mut paths: BTreeMap<String, PathBuf> = BTreeMap::new();
        let mut loaded = BTreeMap::new();
        for path in script_files(scripts)? {
            let model = path
                .file_stem()
                .and_then(|stem| stem.to_str())
                .ok_or_else(|| ScriptError::FileName { path: path.clone() })?
                .to_owned();
            if let Some(first) = paths.get(&model) {
                return Err(ScriptError::Duplicate {
                    first: first.clone(),
                    second: path,
                    model: format!("{name}/{model}"),
                });
            }
            let text = std::fs::read_to_string(&path).map_err(|error| ScriptError::Unreadable {
                path: path.clone(),
                cause: error.to_string(),
            })?;
            loaded.insert(model.clone(), Script::read(&path, &text)?);
            paths.insert(model, path);
        }
        Ok(Self {
            name: name.to_owned(),
            scripts: loaded,
            error_counts: Mutex::default(),
        })
    }

    fn script(&self, model: &str) -> Result<&Script, ProviderError> {
        self.scripts.get(model).ok_or_else(|| {
            let available = if self.scripts.is_empty() {
                format!("set [providers.{}] scripts", self.name)
            } else {
                let names: Vec<_> = self.scripts.keys().map(String::as_str).collect();
                format!("scripts exist for {}", names.join(", "))
            };
            ProviderError::new(
                ErrorCategory::BadRequest,
                format!("no script for model \"{}/{model}\": {available}", self.name),
            )
        })
    }

    /// The next error to raise before this reply; `None` if all were raised. A reply with errors only starts over.
    fn next_error(&self, reply: &Reply, conversation: u64) -> Option<ProviderError> {
        let total: u32 = reply
            .errors
            .iter()
            .fold(0, |sum, raise| sum.saturating_add(raise.times));
        if total == 0 {
            return None;
        }
        let mut error_counts = self
            .error_counts
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut raised = error_counts.remove(&conversation).unwrap_or(0);
        if raised >= total {
            if reply.has_content() {
                return None;
            }
            raised = 0;
        }
        if error_counts.len() >= MAX_COUNTED_CONVERSATIONS
            && let Some(any) = error_counts.keys().next().copied()
        {
            error_counts.remove(&any);
        }
        error_counts.insert(conversation, raised + 1);
        let raise = reply.errors.iter().find(|raise| {
            let is_due = raised < raise.times;
            raised = raised.saturating_sub(raise.times);
            is_due
        })?;
        Some(ProviderError {
            retry_after: raise.retry_after,
            ..ProviderError::new(raise.category, raise.message.clone())
        })
    }
}

/// What a service would get, for the record of the turn.
fn sent_request(request: &ChatRequest<'_>) -> Result<SentRequest, ProviderError> {
    #[derive(Serialize)]
    struct Body<'a> {
        model: &'a str,
        system: &'a str,
        messages: &'a [Message],
        tools: &'a [ToolSpec],
    }
    let body = Body {
        model: request.model,
        system: request.system,
        messages: request.messages,
        tools: request.tools,
    };
    Ok(SentRequest {
        head: Arc::default(),
        body: wire_json::serialize(&body)?.into(),
    })
}

impl Provider for ScriptedProvider {
    fn model_names(&self) -> Option<Vec<String>> {
        Some(self.scripts.keys().cloned().collect())
    }

    fn complete<'a>(
        &'a self,
        request: ChatRequest<'a>,
        deltas: &'a mut (dyn FnMut(Delta<'_>) + Send),
    ) -> BoxFuture<'a, Result<crate::providers::Reply, ProviderError>> {
        Box::pin(async move {
            let script = self.script(request.model)?;
            deltas(Delta::Sending(&sent_request(&request)?));
            let state = ConversationState::from_messages(request.messages);
            let (series, position, reply) =
                script.select_reply(&state.input, state.turn).ok_or_else(|| {
                    ProviderError::new(
                        ErrorCategory::BadRequest,
                        format!(
                            "the script of {}/{} has no reply for this input; add one without `match`",
                            self.name, request.model
                        ),
                    )
                })?;
            if let Some(error) = self.next_error(reply, fingerprint(&request, series, position)) {
                return Err(error);
            }
            let message = render_reply(reply, &state).map_err(template_error)?;
            let usage = TokenUsage {
                input: reply
                    .input_tokens
                    .unwrap_or_else(|| estimate_prompt(&request)),
                output: reply
                    .output_tokens
                    .unwrap_or_else(|| estimate_message(&message)),
                ..TokenUsage::default()
            };
            let duration = reply
                .delay
                .saturating_mul(u32::try_from(usage.output).unwrap_or(u32::MAX));
            // Like a real service, report the input first: it is all that is known if the reply breaks off.
            deltas(Delta::Usage(TokenUsage { output: 0, ..usage }));
            stream_text(&message.content, duration, request.stream, deltas).await;
            let stop_reason = match (&reply.stop_reason, message.tool_calls.is_empty()) {
                (Some(stop_reason), _) => stop_reason.clone(),
                (None, true) => "end_turn".to_owned(),
                (None, false) => "tool_use".to_owned(),
            };
            Ok(crate::providers::Reply {
                message,
                usage: Some(usage),
                stop_reason: Some(stop_reason),
                model: Some(request.model.to_owned()),
                outcome: crate::providers::ReplyOutcome::Complete,
                refusal: None,
            })
        })
    }
}

/// What the messages of a conversation say about the next reply.
struct ConversationState<'a> {
    /// The last user message.
    input: Cow<'a, str>,
    /// The number of the next turn: 1 after a user message.
    turn: usize,
    /// The tool results of the previous turn.
    results: &'a [ToolResult],
}

impl<'a> ConversationState<'a> {
    fn from_messages(messages: &'a [Message]) -> Self {
        let mut state = Self {
            input: Cow::Borrowed(""),
            turn: 1,
            results: &[],
        };
        for message in messages {
            match message {
                Message::User { content } => {
                    state = Self {
                        input: content.to_plain_text(),
                        turn: 1,
                        results: &[],
                    };
                }
                Message::Assistant(_) => {
                    state.turn += 1;
                    state.results = &[];
                }
                Message::Tool { tool_results } => state.results = tool_results,
            }
        }
        state
    }
}

fn render_reply(
    reply: &Reply,
    state: &ConversationState<'_>,
) -> Result<AssistantMessage, TemplateError> {
    let context = TemplateContext {
        input: &state.input,
        results: state.results,
    };
    let content = match &reply.text {
        Some(text) => text.render(context)?,
        None => String::new(),
    };
    let tool_calls = reply
        .calls
        .iter()
        .enumerate()
        .map(|(position, call)| {
            Ok(ToolCall {
                id: format!("scripted_{}_{}", state.turn, position + 1),
                provider_id: String::new(),
                name: call.name.clone(),
                arguments: call.render_arguments(context)?.into(),
                invalid_arguments: None,
            })
        })
        .collect::<Result<_, _>>()?;
    Ok(AssistantMessage {
        content,
        tool_calls,
        echo: None,
    })
}

/// Waits for the duration of the reply, and emits its text word by word if it is streamed.
async fn stream_text(
    text: &str,
    duration: Duration,
    stream: bool,
    deltas: &mut (dyn FnMut(Delta<'_>) + Send),
) {
    let words: Vec<&str> = text.split_inclusive(char::is_whitespace).collect();
    if !stream || words.is_empty() {
        if !duration.is_zero() {
            tokio::time::sleep(duration).await;
        }
        return;
    }
    let pause = duration / u32::try_from(words.len()).unwrap_or(u32::MAX);
    for word in words {
        if !pause.is_zero() {
            tokio::time::sleep(pause).await;
        }
        deltas(Delta::Text(word));
    }
}

fn template_error(error: TemplateError) -> ProviderError {
    let category = match error {
        TemplateError::NoResult { .. } => ErrorCategory::BadRequest,
        TemplateError::TooLarge => ErrorCategory::Server,
    };
    ProviderError::new(category, error.to_string())
}

/// Distinguishes conversations that wait for the same reply.
fn fingerprint(request: &ChatRequest<'_>, series: usize, position: usize) -> u64 {
    let mut hasher = DefaultHasher::new();
    (request.model, request.system, series, position).hash(&mut hasher);
    for message in request.messages {
        match message {
            Message::User { content } => content.to_plain_text().hash(&mut hasher),
            Message::Assistant(reply) => {
                reply.content.hash(&mut hasher);
                for call in &reply.tool_calls {
                    (&call.name, call.arguments.get()).hash(&mut hasher);
                }
            }
            Message::Tool { tool_results } => {
                for result in tool_results {
                    result.content.hash(&mut hasher);
                }
            }
        }
    }
    hasher.finish()
}

/// Estimates four bytes per token.
fn token_count(bytes: usize) -> u64 {
    bytes.div_ceil(4) as u64
}

fn estimate_prompt(request: &ChatRequest<'_>) -> u64 {
    let messages = request.messages.iter().map(|message| match message {
        Message::User { content } => {
            let attached = content.attachments().map(estimate_tokens);
            token_count(content.text_bytes()) + attached.sum::<usize>() as u64
        }
        Message::Assistant(reply) => estimate_message(reply),
        Message::Tool { tool_results } => tool_results
            .iter()
            .map(|result| token_count(result.content.len()))
            .sum(),
    });
    token_count(request.system.len()) + messages.sum::<u64>()
}

fn estimate_message(message: &AssistantMessage) -> u64 {
    let calls = message
        .tool_calls
        .iter()
        .map(|call| token_count(call.name.len() + call.arguments.get().len()));
    token_count(message.content.len()) + calls.sum::<u64>()
}

fn script_files(scripts: &[PathBuf]) -> Result<Vec<PathBuf>, ScriptError> {
    let mut files = Vec::new();
    for path in scripts {
        if path.is_dir() {
            files.extend(scripts_in(path)?);
        } else if path.is_file() {
            files.push(path.clone());
        } else {
            return Err(ScriptError::NotFound { path: path.clone() });
        }
    }
    Ok(files)
}

fn scripts_in(dir: &Path) -> Result<Vec<PathBuf>, ScriptError> {
    let unreadable = |error: std::io::Error| ScriptError::UnreadableDirectory {
        path: dir.to_owned(),
        cause: error.to_string(),
    };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        if path.is_file()
            && path
                .extension()
                .is_some_and(|extension| extension == "toml")
        {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::ScriptedProvider;
    use crate::domain::agent::params::Params;
    use crate::domain::message::{AssistantMessage, Message, ToolResult};
    use crate::providers::{ChatRequest, Delta, ErrorCategory, Provider, ProviderError, Reply};

    struct Fixture {
        scripted: ScriptedProvider,
        _dir: tempfile::TempDir,
    }

    impl Fixture {
        fn with(script: &str) -> Self {
            let dir = tempfile::tempdir().expect("a directory");
            std::fs::write(dir.path().join("m.toml"), script).expect("a script");
            std::fs::write(dir.path().join("notes.md"), "no script").expect("a file");
            let scripted =
                ScriptedProvider::load("scripted", &[dir.path().to_owned()]).expect("a provider");
            Self {
                scripted,
                _dir: dir,
            }
        }

        async fn complete(&self, messages: &[Message]) -> Result<Reply, ProviderError> {
            self.complete_model("m", messages, &mut |_| {}).await
        }

        async fn complete_model(
            &self,
            model: &str,
            messages: &[Message],
            deltas: &mut (dyn FnMut(Delta<'_>) + Send),
        ) -> Result<Reply, ProviderError> {
            let request = ChatRequest {
                tool_choice: None,
                model,
                system: "",
                messages,
                blobs: None,
                tools: &[],
                params: &Params::default(),
                stream: true,
                is_prompt_reused: false,
                facts: None,
                cache_key: "",
                conversation_id: "",
                trace: None,
                api_key: None,
            };
            self.scripted.complete(request, deltas).await
        }
    }

    fn user(content: &str) -> Message {
        Message::user(content)
    }

    fn results(contents: &[&str]) -> Message {
        let tool_results = contents
            .iter()
            .map(|content| ToolResult::text("", *content, false));
        Message::Tool {
            tool_results: tool_results.collect(),
        }
    }

    #[tokio::test]
    async fn turns_are_counted_from_the_conversation() {
        let fixture = Fixture::with(
            r#"
            [[replies]]
            tool_calls = [{ name = "call_agent", arguments = { agent = "a", task = "read {{input}}", n = 1 } }]
            [[replies]]
            text = "read: {{result.1}} and {{result.2}}"
            input_tokens = 7
            output_tokens = 3
            stop_reason = "max_tokens"
            "#,
        );
        let first = fixture.complete(&[user("it")]).await.expect("a reply");
        let call = &first.message.tool_calls[0];
        assert_eq!(call.id, "scripted_1_1");
        assert_eq!(
            call.arguments.get(),
            r#"{"agent":"a","n":1,"task":"read it"}"#
        );
        assert_eq!(first.stop_reason.as_deref(), Some("tool_use"));
        assert!(first.usage.is_some_and(|u| u.input == 1 && u.output > 1));
        let conversation = [
            user("it"),
            Message::Assistant(first.message),
            results(&["x", "y"]),
        ];
        let second = fixture.complete(&conversation).await.expect("a reply");
        assert_eq!(second.message.content, "read: x and y");
        assert_eq!(second.stop_reason.as_deref(), Some("max_tokens"));
        assert!(second.usage.is_some_and(|u| u.input == 7 && u.output == 3));
        let mut session = conversation.to_vec();
        session.push(Message::Assistant(AssistantMessage::default()));
        session.push(user("more"));
        let after_session = fixture.complete(&session).await.expect("a reply");
        assert_eq!(after_session.message.tool_calls.len(), 1);
    }

    #[tokio::test]
    async fn text_is_streamed_word_by_word() {
        let fixture = Fixture::with("delay_ms = 1\n[[replies]]\ntext = \"one two\\nthree \"\n");
        let mut chunks = Vec::new();
        let reply = fixture
            .complete_model("m", &[user("")], &mut |delta| {
                if let Delta::Text(word) = delta {
                    chunks.push(word.to_owned());
                }
            })
            .await
            .expect("a reply");
        assert_eq!(chunks, ["one ", "two\n", "three "]);
        assert_eq!(reply.message.content, chunks.concat());
        assert_eq!(reply.model.as_deref(), Some("m"));
    }

    #[tokio::test]
    async fn errors_are_counted_per_conversation() {
        let fixture = Fixture::with(
            r#"
            [[replies]]
            errors = [{ category = "rate_limit", times = 2, retry_after_ms = 5 }, { category = "server", message = "boo" }]
            text = "at last"
            [[replies]]
            match = "broken"
            errors = [{ category = "overloaded" }]
            "#,
        );
        for _ in 0..2 {
            for expected in [
                "rate_limit: scripted rate_limit",
                "rate_limit: scripted rate_limit",
                "server: boo",
            ] {
                let error = fixture.complete(&[user("a")]).await.expect_err("an error");
                assert_eq!(error.to_string(), expected);
                if error.category == ErrorCategory::RateLimit {
                    assert_eq!(error.retry_after, Some(std::time::Duration::from_millis(5)));
                }
                let other = fixture
                    .complete(&[user("broken")])
                    .await
                    .expect_err("an error");
                assert_eq!(other.category, ErrorCategory::Overloaded);
            }
            let reply = fixture.complete(&[user("a")]).await.expect("a reply");
            assert_eq!(reply.message.content, "at last");
        }
    }

    #[tokio::test]
    async fn missing_replies_are_explained() {
        let fixture = Fixture::with("[[replies]]\nmatch = \"a\"\ntext = \"{{result.1}}\"\n");
        let error_text = |error: ProviderError| error.to_string();
        assert_eq!(
            error_text(fixture.complete(&[user("a")]).await.expect_err("an error")),
            "bad_request: the script quotes {{result.1}}, but the last turn has 0 tool results"
        );
        assert_eq!(
            error_text(fixture.complete(&[user("b")]).await.expect_err("an error")),
            "bad_request: the script of scripted/m has no reply for this input; add one without `match`"
        );
        assert_eq!(
            error_text(
                fixture
                    .complete_model("n", &[user("a")], &mut |_| {})
                    .await
                    .expect_err("an error")
            ),
            "bad_request: no script for model \"scripted/n\": scripts exist for m"
        );
    }

    #[test]
    fn duplicate_scripts_and_missing_files_are_rejected() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("m.toml");
        std::fs::write(&file, "[[replies]]\ntext = \"\"\n").expect("a script");
        let duplicate = ScriptedProvider::load("s", &[dir.path().to_owned(), file]).err();
        assert!(duplicate.is_some_and(|error| error.to_string().contains("both scripts of s/m")));
        let missing = ScriptedProvider::load("s", &[dir.path().join("none")]).err();
        let missing = missing.expect("an error").to_string();
        assert!(missing.contains("neither a file nor a directory"));
    }

    #[tokio::test]
    async fn concurrent_requests_are_independent() {
        let fixture = Arc::new(Fixture::with("[[replies]]\ntext = \"echo {{input}}\"\n"));
        let requests = (0..50).map(|n| {
            let fixture = fixture.clone();
            async move {
                let reply = fixture
                    .complete(&[user(&n.to_string())])
                    .await
                    .expect("a reply");
                assert_eq!(reply.message.content, format!("echo {n}"));
            }
        });
        futures_util::future::join_all(requests).await;
    }
}
