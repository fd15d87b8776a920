//! The replies of OpenAI's Responses API, whole or as a stream of events.

use std::borrow::Cow;

use indexmap::IndexMap;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::{RawValue, to_raw_value};

use crate::domain::message::{AssistantMessage, Echo, ToolCall};
use crate::domain::usage::TokenUsage;
use crate::providers::echo::ReplyOrigin;
use crate::providers::http_client::{BodyPart, PartError};
use crate::providers::openai_fields::service_tier_delta;
use crate::providers::reply_builder::{ReplyBuilder, append};
use crate::providers::stream_decoder::StreamFormat;
use crate::providers::token_counts::{self, Lenient, TokenCount, TokenCounts, TokenDetails};
use crate::providers::{
    Delta, ErrorCategory, ProviderError, Reply, ReplyOutcome, error_mapping, tool_call_codec,
    wire_json,
};

/// A whole response, which the last event of a stream carries too.
#[derive(Deserialize)]
struct ResponseIn<'a> {
    status: Option<String>,
    model: Option<String>,
    #[serde(borrow)]
    output: Option<Vec<&'a RawValue>>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
    incomplete_details: Option<IncompleteDetails>,
    #[serde(default)]
    usage: Lenient<UsageIn>,
    #[serde(default)]
    service_tier: Lenient<String>,
}

#[derive(Deserialize)]
struct IncompleteDetails {
    reason: Option<String>,
}

/// One event. Fields whose type depends on the kind of event are parsed later.
#[derive(Deserialize)]
struct Event<'a> {
    #[serde(borrow, rename = "type", default)]
    kind: Cow<'a, str>,
    output_index: Option<u64>,
    #[serde(borrow)]
    item_id: Option<Cow<'a, str>>,
    summary_index: Option<u64>,
    #[serde(borrow)]
    delta: Option<&'a RawValue>,
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
    #[serde(borrow)]
    item: Option<&'a RawValue>,
    #[serde(borrow)]
    response: Option<&'a RawValue>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct ItemIn<'a> {
    #[serde(borrow, rename = "type", default)]
    kind: Cow<'a, str>,
    id: Option<String>,
    call_id: Option<String>,
    name: Option<String>,
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
    #[serde(borrow)]
    content: Option<&'a RawValue>,
    #[serde(borrow)]
    summary: Option<&'a RawValue>,
    #[serde(borrow)]
    phase: Option<Cow<'a, str>>,
    namespace: Option<IgnoredAny>,
    caller: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct PartIn {
    text: Option<String>,
    refusal: Option<String>,
}

#[derive(Deserialize)]
struct UsageIn {
    #[serde(default)]
    input_tokens: TokenCount,
    #[serde(default)]
    output_tokens: TokenCount,
    #[serde(default)]
    input_tokens_details: Lenient<TokenDetails>,
    #[serde(default)]
    output_tokens_details: Lenient<TokenDetails>,
}

impl UsageIn {
    fn into_usage(self) -> Option<TokenUsage> {
        let counts = TokenCounts {
            total: TokenCount::Absent,
            input: self.input_tokens,
            output: self.output_tokens,
            input_details: self.input_tokens_details,
            output_details: self.output_tokens_details,
        };
        counts.into_usage()
    }
}

#[derive(Default)]
pub struct ResponsesReplyBuilder {
    items: Vec<OutputItem>,
    text: String,
    /// What the model says while it works. It is no part of the answer.
    commentary: String,
    usage: Option<TokenUsage>,
    is_refused: bool,
    /// Whether the reply has arrived completely.
    is_finished: bool,
    stop_reason: Option<String>,
    model: Option<String>,
}

struct OutputItem {
    index: Option<u64>,
    id: String,
    kind: ItemKind,
    /// `None` until the item is complete.
    raw: Option<Box<RawValue>>,
    /// Whether it has fields that text and tool calls do not preserve.
    has_extra_fields: bool,
    is_commentary: bool,
}

enum ItemKind {
    /// How many bytes of its text were emitted.
    Message(usize),
    Call {
        call: ToolCall,
        /// The received pieces of the arguments.
        argument_text: String,
    },
    /// Whether any of its text was emitted.
    Reasoning(bool),
    Other,
}

impl ItemKind {
    fn new_call() -> Self {
        Self::Call {
            call: ToolCall {
                id: String::new(),
                provider_id: String::new(),
                name: String::new(),
                arguments: crate::domain::message::empty_arguments(),
            },
            argument_text: String::new(),
        }
    }
}

impl ReplyBuilder for ResponsesReplyBuilder {
    const FORMAT: StreamFormat = StreamFormat::Sse;

    fn push_part(
        &mut self,
        part: BodyPart<'_>,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<bool, PartError> {
        match part {
            BodyPart::Message(data) if data.trim() == "[DONE]" => Ok(true),
            BodyPart::Message(text) => self.push_event(text, deltas),
            BodyPart::Document(text) => {
                self.push_response(text, deltas)?;
                Ok(true)
            }
            BodyPart::End => Ok(false),
        }
    }

    fn has_final_usage(&self) -> bool {
        self.is_finished && self.usage.is_some()
    }

    fn finish(mut self, origin: ReplyOrigin<'_>) -> Result<Reply, ProviderError> {
        let mut tool_calls = Vec::new();
        for item in &mut self.items {
            if let ItemKind::Call {
                call,
                argument_text,
            } = &mut item.kind
            {
                if !argument_text.is_empty() {
                    call.arguments = tool_call_codec::arguments_from_text(argument_text);
                }
                tool_calls.push(call.clone());
            }
        }
        if self.text.is_empty() && tool_calls.is_empty() {
            // All that there is.
            self.text = std::mem::take(&mut self.commentary);
        }
        let is_empty = self.text.is_empty() && tool_calls.is_empty();
        let end = match self.stop_reason.as_deref() {
            _ if !tool_calls.is_empty() => ReplyOutcome::Complete,
            _ if self.is_refused => ReplyOutcome::Refused,
            _ if !is_empty => ReplyOutcome::Complete,
            Some("completed") => ReplyOutcome::Complete,
            Some("max_output_tokens") => ReplyOutcome::Truncated,
            Some("content_filter") => ReplyOutcome::Refused,
            _ => {
                let message = "response contains no content";
                return Err(ProviderError::new(ErrorCategory::Server, message));
            }
        };
        let has_filled = tool_call_codec::fill_missing_ids(&mut tool_calls);
        let echo = match is_empty || has_filled || self.is_plain() {
            true => None,
            false => self.build_echo(origin),
        };
        Ok(Reply {
            message: AssistantMessage {
                content: self.text,
                tool_calls,
                echo,
            },
            usage: self.usage,
            stop_reason: self.stop_reason,
            model: self.model,
            outcome: end,
            refusal: None,
        })
    }
}

impl ResponsesReplyBuilder {
    fn push_event(
        &mut self,
        text: &str,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<bool, PartError> {
        let event: Event<'_> = wire_json::parse(text)?;
        if event.error.is_some() || event.kind == "error" {
            return Err(error_mapping::from_error_body(text).into());
        }
        match event.kind.as_ref() {
            "response.output_item.added" | "response.output_item.done" => {
                if let Some(item) = event.item {
                    let is_done = event.kind.ends_with("done");
                    self.push_item(event.output_index, item, is_done, deltas)?;
                }
            }
            "response.output_text.delta" | "response.refusal.delta" => {
                let delta: String = match event.delta {
                    Some(delta) => wire_json::parse(delta.get())?,
                    None => return Ok(false),
                };
                self.is_refused |= event.kind == "response.refusal.delta" && !delta.is_empty();
                let item = self.find_or_start(&event, || ItemKind::Message(0))?;
                if let ItemKind::Message(emitted) = &mut item.kind {
                    *emitted += delta.len();
                }
                let is_commentary = item.is_commentary;
                self.push_text(delta, is_commentary, deltas);
            }
            "response.reasoning_summary_text.delta" | "response.reasoning_text.delta" => {
                if let Some(delta) = event.delta {
                    let delta: String = wire_json::parse(delta.get())?;
                    let item = self.find_or_start(&event, || ItemKind::Reasoning(false))?;
                    emit_reasoning(item, &delta, deltas);
                }
            }
            // Each part of a summary is a paragraph.
            "response.reasoning_summary_part.added" if event.summary_index > Some(0) => {
                deltas(Delta::Reasoning("\n\n"));
            }
            "response.function_call_arguments.delta" => {
                if let Some(delta) = event.delta {
                    let delta: String = wire_json::parse(delta.get())?;
                    let item = self.find_or_start(&event, ItemKind::new_call)?;
                    if let ItemKind::Call { argument_text, .. } = &mut item.kind {
                        append(argument_text, delta);
                    }
                }
            }
            "response.function_call_arguments.done" => {
                if let Some(arguments) = event.arguments {
                    let arguments = tool_call_codec::arguments_from_json(Some(arguments));
                    let item = self.find_or_start(&event, ItemKind::new_call)?;
                    if let ItemKind::Call { argument_text, .. } = &mut item.kind {
                        arguments.get().clone_into(argument_text);
                    }
                }
            }
            "response.completed" | "response.incomplete" | "response.failed" => {
                if let Some(response) = event.response {
                    self.push_response(response.get(), deltas)?;
                }
                return match event.kind.as_ref() {
                    "response.failed" => Err(error_mapping::from_error_body(text).into()),
                    _ => Ok(true),
                };
            }
            // Ends of parts and unknown events.
            _ => {}
        }
        Ok(false)
    }

    /// Adds a whole response. Its items may have arrived already.
    fn push_response(
        &mut self,
        text: &str,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<(), PartError> {
        self.is_finished = true;
        let response: ResponseIn<'_> = wire_json::parse(text).inspect_err(|_| {
            self.set_usage(
                token_counts::parse_usage_only(text).and_then(UsageIn::into_usage),
                deltas,
            );
        })?;
        if let Some(delta) = service_tier_delta(response.service_tier) {
            deltas(delta);
        }
        self.set_usage(response.usage.0.and_then(UsageIn::into_usage), deltas);
        if let Some(error) = response.error {
            return Err(error_mapping::from_error_body(error.get()).into());
        }
        if response.status.as_deref() == Some("failed") {
            return Err(error_mapping::from_error_body(text).into());
        }
        self.model = response.model.or(self.model.take());
        let reason = response
            .incomplete_details
            .and_then(|details| details.reason);
        self.stop_reason = reason.or(response.status);
        for (position, item) in response.output.into_iter().flatten().enumerate() {
            let existing = self.items.get(position);
            if existing.is_none_or(|item| item.raw.is_none()) {
                let index = existing.map_or(Some(position as u64), |item| item.index);
                self.push_item(index, item, true, deltas)?;
            }
        }
        Ok(())
    }

    /// Adds an item, or the beginning of one.
    fn push_item(
        &mut self,
        index: Option<u64>,
        raw: &RawValue,
        is_done: bool,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<(), PartError> {
        let parsed: ItemIn<'_> = wire_json::parse(raw.get())?;
        let id = parsed.id.unwrap_or_default();
        let kind = match parsed.kind.as_ref() {
            "message" => ItemKind::Message(0),
            "function_call" => ItemKind::new_call(),
            "reasoning" => ItemKind::Reasoning(false),
            _ => ItemKind::Other,
        };
        if let (ItemKind::Reasoning(_), false) = (&kind, is_done) {
            deltas(Delta::ReasoningStarted);
        }
        let item = match is_done {
            true => find_or_start_item(&mut self.items, index, &id, kind)?,
            false => start_item(&mut self.items, index, &id, kind)?,
        };
        let is_message = matches!(item.kind, ItemKind::Message(_));
        let was_commentary = item.is_commentary;
        item.is_commentary |= parsed.phase.as_deref() == Some("commentary");
        let is_commentary = item.is_commentary;
        item.has_extra_fields = !matches!(parsed.kind.as_ref(), "message" | "function_call")
            || parsed.phase.is_some()
            || parsed.namespace.is_some()
            || parsed.caller.is_some();
        if let ItemKind::Call {
            call,
            argument_text,
        } = &mut item.kind
        {
            call.id = parsed.call_id.unwrap_or_default();
            call.name = parsed.name.unwrap_or_default();
            if let Some(arguments) = parsed.arguments.filter(|_| is_done) {
                call.arguments = tool_call_codec::arguments_from_json(Some(arguments));
                argument_text.clear();
            }
        }
        if is_done {
            item.raw = Some(raw.to_owned());
            if let ItemKind::Reasoning(false) = item.kind {
                let parts = parsed.summary.or(parsed.content);
                let parts = parts.and_then(|parts| serde_json::from_str(parts.get()).ok());
                let parts: Vec<PartIn> = parts.unwrap_or_default();
                let texts: Vec<_> = parts.into_iter().filter_map(|part| part.text).collect();
                emit_reasoning(item, &texts.join("\n\n"), deltas);
            }
        }
        let Some(content) = parsed.content.filter(|_| is_message && is_done) else {
            return Ok(());
        };
        let text = match serde_json::from_str::<Vec<PartIn>>(content.get()) {
            Ok(parts) => parts.into_iter().fold(String::new(), |mut text, part| {
                let refusal = part.refusal.unwrap_or_default();
                self.is_refused |= !refusal.is_empty();
                append(&mut text, part.text.unwrap_or_default());
                append(&mut text, refusal);
                text
            }),
            Err(_) => wire_json::parse::<Option<String>>(content.get())?.unwrap_or_default(),
        };
        // Emit only the text that deltas have not emitted. A service may send no deltas.
        let ItemKind::Message(emitted) = &mut item.kind else {
            return Ok(());
        };
        let rest = text.get(*emitted..).map(str::to_owned);
        let before = text
            .get(..*emitted)
            .filter(|_| is_commentary && !was_commentary);
        *emitted = text.len().max(*emitted);
        // The service says only now what the text was.
        if let Some(answer) = before.and_then(|before| self.text.strip_suffix(before)) {
            let length = answer.len();
            self.commentary.push_str(&self.text[length..]);
            self.text.truncate(length);
        }
        if let Some(rest) = rest {
            self.push_text(rest, is_commentary, deltas);
        }
        Ok(())
    }

    fn find_or_start(
        &mut self,
        event: &Event<'_>,
        new: impl FnOnce() -> ItemKind,
    ) -> Result<&mut OutputItem, ProviderError> {
        let id = event.item_id.as_deref().unwrap_or_default();
        find_or_start_item(&mut self.items, event.output_index, id, new())
    }

    fn push_text(&mut self, text: String, is_commentary: bool, deltas: &mut dyn FnMut(Delta<'_>)) {
        match is_commentary {
            _ if text.is_empty() => {}
            true => {
                deltas(Delta::Reasoning(&text));
                append(&mut self.commentary, text);
            }
            false => {
                deltas(Delta::Text(&text));
                append(&mut self.text, text);
            }
        }
    }

    fn set_usage(&mut self, usage: Option<TokenUsage>, deltas: &mut dyn FnMut(Delta<'_>)) {
        if let Some(usage) = usage {
            deltas(Delta::Usage(usage));
        }
        self.usage = usage;
    }

    /// Whether text and tool calls alone can rebuild the reply: one message, then calls.
    fn is_plain(&self) -> bool {
        let is_message = |item: &OutputItem| matches!(item.kind, ItemKind::Message(_));
        let after_first = self.items.iter().skip(1);
        !self.items.iter().any(|item| item.has_extra_fields)
            && !after_first.into_iter().any(is_message)
    }

    /// All items as the service sent them, without those that it would reject; `None` if any item is incomplete.
    fn build_echo(&self, origin: ReplyOrigin<'_>) -> Option<Echo> {
        // The service rejects reasoning that is not followed by a message or a call.
        let is_output =
            |item: &OutputItem| !matches!(item.kind, ItemKind::Reasoning(_) | ItemKind::Other);
        let length = self.items.iter().rposition(is_output)? + 1;
        let items: Option<Vec<_>> = self.items[..length]
            .iter()
            .map(OutputItem::to_echo_item)
            .collect();
        origin.echo(&items?)
    }
}

impl OutputItem {
    /// The item in a form that the service accepts.
    fn to_echo_item(&self) -> Option<Cow<'_, RawValue>> {
        let raw = self.raw.as_deref()?;
        let ItemKind::Call { call, .. } = &self.kind else {
            return Some(Cow::Borrowed(raw));
        };
        let parsed: ItemIn<'_> = serde_json::from_str(raw.get()).ok()?;
        let (id, name) = (
            tool_call_codec::short_id(&call.id),
            tool_call_codec::sanitize_name(&call.name),
        );
        let sent_arguments: Option<Cow<'_, str>> = parsed
            .arguments
            .and_then(|arguments| serde_json::from_str(arguments.get()).ok());
        let arguments = call.arguments.get();
        // A truncated call has incomplete arguments, and a model may invent a name.
        let is_unchanged = sent_arguments.is_some_and(|sent| sent.trim() == arguments);
        if is_unchanged && id == call.id && name == call.name {
            return Some(Cow::Borrowed(raw));
        }
        let fields = [
            ("call_id", &*id),
            ("name", &*name),
            ("arguments", arguments),
        ];
        with_fields(raw, &fields).map(Cow::Owned)
    }
}

/// The items of an echo, with unique ids for calls to which the service gave the same id: it rejects duplicates.
pub fn echo_items<'a>(echo: &'a RawValue, calls: &[ToolCall]) -> Option<Vec<Cow<'a, RawValue>>> {
    let items: Vec<&RawValue> = serde_json::from_str(echo.get()).ok()?;
    if calls.iter().all(|call| call.provider_id.is_empty()) {
        return Some(items.into_iter().map(Cow::Borrowed).collect());
    }
    let mut calls = calls.iter();
    let renamed = items.into_iter().map(|item| {
        let parsed: ItemIn<'_> = serde_json::from_str(item.get()).ok()?;
        let call = match parsed.kind.as_ref() {
            "function_call" => calls.next().filter(|call| !call.provider_id.is_empty()),
            _ => None,
        };
        match call {
            None => Some(Cow::Borrowed(item)),
            Some(call) => with_fields(item, &[("call_id", &tool_call_codec::short_id(&call.id))])
                .map(Cow::Owned),
        }
    });
    renamed.collect()
}

/// Returns the item with these fields replaced.
fn with_fields(item: &RawValue, texts: &[(&'static str, &str)]) -> Option<Box<RawValue>> {
    let mut fields: IndexMap<Cow<'_, str>, Box<RawValue>> =
        serde_json::from_str(item.get()).ok()?;
    for (field, text) in texts {
        fields.insert(Cow::Borrowed(*field), to_raw_value(text).ok()?);
    }
    to_raw_value(&fields).ok()
}

fn emit_reasoning(item: &mut OutputItem, text: &str, deltas: &mut dyn FnMut(Delta<'_>)) {
    if let ItemKind::Reasoning(is_emitted) = &mut item.kind
        && !text.is_empty()
    {
        *is_emitted = true;
        deltas(Delta::Reasoning(text));
    }
}

/// Finds the item by index, or by id because some servers send no index. Starts a new item of `kind` if there is none.
fn find_or_start_item<'a>(
    items: &'a mut Vec<OutputItem>,
    index: Option<u64>,
    id: &str,
    kind: ItemKind,
) -> Result<&'a mut OutputItem, ProviderError> {
    let position = match index {
        Some(_) => items.iter().rposition(|item| item.index == index),
        None => items.iter().rposition(|item| item.id == id),
    };
    match position {
        Some(position) => Ok(&mut items[position]),
        None => start_item(items, index, id, kind),
    }
}

fn start_item<'a>(
    items: &'a mut Vec<OutputItem>,
    index: Option<u64>,
    id: &str,
    kind: ItemKind,
) -> Result<&'a mut OutputItem, ProviderError> {
    tool_call_codec::check_call_count(items.len() + 1)?;
    items.push(OutputItem {
        index,
        id: id.to_owned(),
        kind,
        raw: None,
        has_extra_fields: false,
        is_commentary: false,
    });
    let last = items.len() - 1;
    Ok(&mut items[last])
}
