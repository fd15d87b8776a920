//! The replies of Anthropic's Messages API, whole or as a stream of events.

use std::borrow::Cow;

use indexmap::IndexMap;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::{RawValue, to_raw_value};

use crate::domain::message::{AssistantMessage, Echo, ReplyLimit, ToolCall, empty_arguments};
use crate::domain::service::{ReportedBilling, Tier, is_regional};
use crate::domain::usage::TokenUsage;
use crate::providers::call_pieces::{self, ArgumentText};
use crate::providers::echo::ReplyOrigin;
use crate::providers::http_client::{BodyPart, PartError};
use crate::providers::reply_builder::{ReplyBuilder, append};
use crate::providers::stop_reason::{self, ReplyContent};
use crate::providers::stream_decoder::StreamFormat;
use crate::providers::token_counts::{self, Lenient, TokenCount};
use crate::providers::{Delta, ProviderError, Reply, tool_call_codec, wire_json};

/// A whole reply, or the beginning of one in `message_start`.
#[derive(Deserialize)]
struct MessageIn<'a> {
    #[serde(borrow)]
    content: Option<Vec<&'a RawValue>>,
    model: Option<String>,
    stop_reason: Option<String>,
    #[serde(default)]
    stop_details: Lenient<StopDetails>,
    #[serde(default)]
    usage: Lenient<UsageIn>,
}

/// Why the service refused.
#[derive(Deserialize)]
struct StopDetails {
    #[serde(default)]
    explanation: Lenient<String>,
}

#[derive(Deserialize)]
struct Event<'a> {
    #[serde(rename = "type", default)]
    kind: String,
    #[serde(default)]
    index: Lenient<u64>,
    #[serde(borrow)]
    message: Option<MessageIn<'a>>,
    #[serde(borrow)]
    content_block: Option<&'a RawValue>,
    delta: Option<BlockDelta>,
    #[serde(default)]
    usage: Lenient<UsageIn>,
    /// Of a whole message that came as the only event.
    #[serde(borrow)]
    content: Option<&'a RawValue>,
}

/// The `delta` of `content_block_delta` and `message_delta`.
#[derive(Deserialize)]
struct BlockDelta {
    text: Option<String>,
    partial_json: Option<String>,
    thinking: Option<String>,
    signature: Option<String>,
    stop_reason: Option<String>,
    #[serde(default)]
    stop_details: Lenient<StopDetails>,
}

#[derive(Deserialize)]
struct UsageIn {
    #[serde(default)]
    input_tokens: TokenCount,
    #[serde(default)]
    output_tokens: TokenCount,
    #[serde(default)]
    cache_read_input_tokens: TokenCount,
    #[serde(default)]
    cache_creation_input_tokens: TokenCount,
    #[serde(default)]
    output_tokens_details: Lenient<OutputDetails>,
    #[serde(default)]
    speed: Lenient<String>,
    #[serde(default)]
    inference_geo: Lenient<String>,
}

#[derive(Deserialize)]
struct OutputDetails {
    #[serde(default)]
    thinking_tokens: TokenCount,
}

#[derive(Deserialize)]
struct BlockIn<'a> {
    #[serde(rename = "type", default)]
    kind: String,
    text: Option<String>,
    thinking: Option<String>,
    id: Option<String>,
    name: Option<String>,
    #[serde(borrow)]
    input: Option<&'a RawValue>,
    caller: Option<IgnoredAny>,
    toolset_name: Option<IgnoredAny>,
    citations: Option<IgnoredAny>,
}

struct PartialBlock {
    index: Option<u64>,
    kind: BlockKind,
    /// The JSON with which the block started.
    start: Box<RawValue>,
    /// Whether it has fields that text and tool calls do not preserve.
    has_extra_fields: bool,
    appended: AppendedDeltas,
}

enum BlockKind {
    Text(String),
    /// Its arguments are complete when the block is.
    ToolUse(ToolCall),
    Thinking,
    Other,
}

#[derive(Default)]
struct AppendedDeltas {
    text: String,
    json: ArgumentText,
    thinking: String,
    signature: String,
}

#[derive(Default)]
pub struct AnthropicReplyBuilder {
    blocks: Vec<PartialBlock>,
    /// As reported: `input` does not include cached tokens.
    usage: Option<TokenUsage>,
    /// Whether any count was invalid.
    has_invalid_usage: bool,
    /// Whether the usage is final.
    is_finished: bool,
    stop_reason: Option<String>,
    refusal: Option<String>,
    model: Option<String>,
}

impl ReplyBuilder for AnthropicReplyBuilder {
    const FORMAT: StreamFormat = StreamFormat::Sse;

    fn push_part(
        &mut self,
        part: BodyPart<'_>,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<bool, PartError> {
        match part {
            BodyPart::Document(text) => self.push_document(text, deltas),
            BodyPart::Message { event, data } => self.push_event(event, data, deltas),
            // Only `message_stop` is missing.
            BodyPart::Done | BodyPart::End => Ok(self.is_finished),
        }
    }

    fn has_final_usage(&self) -> bool {
        self.is_finished && self.valid_usage().is_some()
    }

    fn finish(mut self, origin: ReplyOrigin<'_>) -> Result<Reply, ProviderError> {
        let limit = stop_reason::limit(self.stop_reason.as_deref());
        let count = self.blocks.len();
        for (position, block) in self.blocks.iter_mut().enumerate() {
            block.finish(limit.map(|limit| (limit, position + 1 == count)));
        }
        let mut text = String::new();
        let mut tool_calls = Vec::new();
        // Plain means that text and tool calls alone can rebuild the message: one text, then calls.
        let mut is_plain = true;
        for block in &self.blocks {
            match &block.kind {
                BlockKind::Text(piece) if piece.is_empty() => {}
                BlockKind::Text(piece) => {
                    is_plain &= text.is_empty() && tool_calls.is_empty() && !block.has_extra_fields;
                    append(&mut text, piece.clone());
                }
                BlockKind::ToolUse(call) => {
                    is_plain &= !block.has_extra_fields;
                    tool_calls.push(call.clone());
                }
                BlockKind::Thinking | BlockKind::Other => is_plain = false,
            }
        }
        if text.trim().is_empty() && self.stop_reason.as_deref() == Some("refusal") {
            text = self.refusal.clone().unwrap_or_default();
        }
        let content = ReplyContent {
            has_text: !text.is_empty(),
            has_calls: !tool_calls.is_empty(),
            is_refused: self.stop_reason.as_deref() == Some("refusal"),
        };
        let end = stop_reason::outcome(self.stop_reason.as_deref(), content)?;
        let has_filled = tool_call_codec::fill_missing_ids(&mut tool_calls);
        let echo = match is_plain || has_filled {
            true => None,
            false => self.build_echo(origin),
        };
        Ok(Reply {
            message: AssistantMessage {
                content: text,
                tool_calls,
                echo,
            },
            usage: self.valid_usage(),
            stop_reason: self.stop_reason,
            model: self.model,
            outcome: end,
            refusal: self.refusal,
        })
    }
}

impl AnthropicReplyBuilder {
    fn push_document(
        &mut self,
        text: &str,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<bool, PartError> {
        self.is_finished = true;
        let message: MessageIn<'_> = wire_json::parse(text).inspect_err(|_| {
            if let Some(usage) = token_counts::parse_usage_only(text) {
                self.push_usage(&usage, deltas);
            }
        })?;
        self.start_message(message, deltas)?;
        Ok(true)
    }

    /// Adds one event. Returns whether it was the last.
    fn push_event(
        &mut self,
        name: &str,
        text: &str,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<bool, PartError> {
        let mut event: Event<'_> = wire_json::parse(text)?;
        if event.content.is_some() && matches!(event.kind.as_str(), "" | "message") {
            return self.push_document(text, deltas);
        }
        if event.kind.is_empty() {
            name.clone_into(&mut event.kind);
        }
        if let Some(usage) = event.usage.0 {
            self.push_usage(&usage, deltas);
        }
        match event.kind.as_str() {
            "message_start" => {
                if let Some(message) = event.message {
                    self.start_message(message, deltas)?;
                }
            }
            "content_block_start" => {
                if let Some(block) = event.content_block {
                    self.push_block(event.index.0, block, deltas)?;
                }
            }
            "content_block_delta" => {
                if let Some(delta) = event.delta {
                    self.push_delta(event.index.0, delta, deltas)?;
                }
            }
            "message_delta" => {
                let delta = event.delta.map(|it| (it.stop_reason, it.stop_details));
                let (stop_reason, details) = delta.unwrap_or_default();
                self.set_refusal(details);
                let stop_reason = stop_reason::known(stop_reason);
                self.is_finished |= stop_reason.is_some();
                self.stop_reason = stop_reason.or(self.stop_reason.take());
            }
            "message_stop" => return Ok(true),
            // `ping`, `content_block_stop` and unknown events.
            _ => {}
        }
        Ok(false)
    }

    fn start_message(
        &mut self,
        message: MessageIn<'_>,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<(), PartError> {
        if let Some(usage) = message.usage.0 {
            self.push_usage(&usage, deltas);
        }
        self.set_refusal(message.stop_details);
        self.model = message.model;
        self.stop_reason = stop_reason::known(message.stop_reason);
        for block in message.content.into_iter().flatten() {
            self.push_block(None, block, deltas)?;
        }
        Ok(())
    }

    fn set_refusal(&mut self, details: Lenient<StopDetails>) {
        let explanation = details.0.and_then(|details| details.explanation.0);
        self.refusal = explanation.or(self.refusal.take());
    }

    /// Adds a block, or the beginning of one.
    fn push_block(
        &mut self,
        index: Option<u64>,
        start: &RawValue,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<(), PartError> {
        let block: BlockIn<'_> = wire_json::parse(start.get())?;
        let mut json = ArgumentText::default();
        let id = block.id.filter(|id| !stop_reason::is_placeholder(id));
        if block.kind == "tool_use" {
            let input = block.input.map(call_pieces::argument_text);
            // A streamed block begins with a placeholder.
            let input = input.filter(|input| !call_pieces::is_empty_object(input));
            let input = input.unwrap_or_default();
            let is_repeat = |it: &&mut PartialBlock| {
                index.is_some() && it.index == index && it.has_call_id(id.as_deref())
            };
            if let Some(repeated) = self.blocks.iter_mut().rfind(is_repeat) {
                repeated.appended.json.push_whole(input);
                return Ok(());
            }
            json.push(&input);
        }
        tool_call_codec::check_call_count(self.blocks.len() + 1)?;
        let kind = match block.kind.as_str() {
            "text" => {
                let text = block.text.unwrap_or_default();
                if !text.is_empty() {
                    deltas(Delta::Text(&text));
                }
                BlockKind::Text(text)
            }
            "tool_use" => BlockKind::ToolUse(ToolCall {
                id: id.unwrap_or_default(),
                provider_id: String::new(),
                name: block.name.unwrap_or_default(),
                arguments: empty_arguments(),
                invalid_arguments: None,
            }),
            "thinking" | "redacted_thinking" => {
                match block.thinking.filter(|text| !text.is_empty()) {
                    Some(text) => deltas(Delta::Reasoning(&text)),
                    None => deltas(Delta::ReasoningStarted),
                }
                BlockKind::Thinking
            }
            _ => BlockKind::Other,
        };
        self.blocks.push(PartialBlock {
            index,
            has_extra_fields: matches!(kind, BlockKind::Thinking | BlockKind::Other)
                || block.caller.is_some()
                || block.toolset_name.is_some()
                || block.citations.is_some(),
            kind,
            start: start.to_owned(),
            appended: AppendedDeltas {
                json,
                ..AppendedDeltas::default()
            },
        });
        Ok(())
    }

    /// Appends to the block with this index. A delta whose block has not begun begins one.
    fn push_delta(
        &mut self,
        index: Option<u64>,
        delta: BlockDelta,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<(), PartError> {
        let at = match self.find_block(index, &delta) {
            Some(at) => at,
            None => {
                let start = match &delta {
                    _ if delta.text.is_some() => r#"{"type":"text","text":""}"#,
                    _ if delta.partial_json.is_some() => {
                        r#"{"type":"tool_use","id":"","name":"","input":{}}"#
                    }
                    _ => r#"{"type":"thinking","thinking":""}"#,
                };
                self.push_block(index, wire_json::parse(start)?, deltas)?;
                self.blocks.len() - 1
            }
        };
        let block = &mut self.blocks[at];
        if let Some(text) = delta.text.filter(|text| !text.is_empty()) {
            if matches!(block.kind, BlockKind::Text(_)) {
                deltas(Delta::Text(&text));
            }
            append(&mut block.appended.text, text);
        }
        if let Some(json) = delta.partial_json {
            block.appended.json.push(&json);
        }
        if let Some(thinking) = delta.thinking.filter(|text| !text.is_empty()) {
            deltas(Delta::Reasoning(&thinking));
            append(&mut block.appended.thinking, thinking);
        }
        append(
            &mut block.appended.signature,
            delta.signature.unwrap_or_default(),
        );
        Ok(())
    }

    /// The block that the delta belongs to: the one with its index, if it is of its kind, else the last of its kind, unless that has another
    /// index.
    fn find_block(&self, index: Option<u64>, delta: &BlockDelta) -> Option<usize> {
        let fits = |block: &PartialBlock| match &block.kind {
            BlockKind::Text(_) => delta.text.is_some(),
            BlockKind::ToolUse(_) => delta.partial_json.is_some(),
            BlockKind::Thinking => delta.thinking.is_some() || delta.signature.is_some(),
            BlockKind::Other => true,
        };
        let is_indexed = |block: &PartialBlock| block.index == index && fits(block);
        let is_candidate = |block: &PartialBlock| {
            (index.is_none() || block.index.is_none() || delta.partial_json.is_some())
                && fits(block)
        };
        let exact = self.blocks.iter().rposition(is_indexed);
        exact.or_else(|| self.blocks.iter().rposition(is_candidate))
    }

    /// Merges counts. A stream sends running totals, spread over several events.
    fn push_usage(&mut self, reported: &UsageIn, deltas: &mut dyn FnMut(Delta<'_>)) {
        let counts = [
            reported.input_tokens,
            reported.output_tokens,
            reported.cache_read_input_tokens,
            reported.cache_creation_input_tokens,
        ];
        if counts == [TokenCount::Absent; 4] {
            return;
        }
        let usage = self.usage.get_or_insert_default();
        // A senseless count does not replace an earlier one.
        let earlier = [
            usage.input,
            usage.output,
            usage.cache_read,
            usage.cache_write,
        ];
        self.has_invalid_usage |= (counts.iter().zip(earlier))
            .any(|(count, earlier)| *count == TokenCount::Invalid && earlier == 0);
        let [input, output, cache_read, cache_write] = counts.map(TokenCount::or_zero);
        usage.input = usage.input.max(input);
        usage.output = usage.output.max(output);
        usage.cache_read = usage.cache_read.max(cache_read);
        usage.cache_write = usage.cache_write.max(cache_write);
        if let Some(details) = &reported.output_tokens_details.0 {
            usage.reasoning = usage.reasoning.max(details.thinking_tokens.or_zero());
        }
        let billing = ReportedBilling {
            tier: reported.speed.0.as_deref().and_then(Tier::named),
            is_regional: reported.inference_geo.0.as_deref().map(is_regional),
        };
        if billing != ReportedBilling::default() {
            deltas(Delta::Billing(billing));
        }
        if let Some(usage) = self.valid_usage() {
            deltas(Delta::Usage(usage));
        }
    }

    /// The usage so far; `None` if any count was invalid.
    fn valid_usage(&self) -> Option<TokenUsage> {
        self.usage
            .filter(|_| !self.has_invalid_usage)
            .map(with_cached_input)
    }

    /// All blocks as the service sent them, without those that it would reject: empty ones, and thinking at the end. `None` if
    /// there are no others.
    fn build_echo(&self, origin: ReplyOrigin<'_>) -> Option<Echo> {
        let is_thinking = |block: &PartialBlock| matches!(block.kind, BlockKind::Thinking);
        let mut blocks: Vec<_> = (self.blocks.iter())
            .filter_map(|block| Some((is_thinking(block), block.to_raw_json()?)))
            .collect();
        let kept = blocks.iter().rposition(|(is_thinking, _)| !is_thinking)? + 1;
        blocks.truncate(kept);
        let blocks: Vec<_> = blocks.into_iter().map(|(_, json)| json).collect();
        origin.echo(&blocks)
    }
}

/// Adds the cached tokens to `input`: the API does not include them in `input_tokens`.
fn with_cached_input(usage: TokenUsage) -> TokenUsage {
    TokenUsage {
        input: usage.input + usage.cache_read + usage.cache_write,
        ..usage
    }
}

impl PartialBlock {
    /// Completes the text or the arguments with the received deltas.
    fn finish(&mut self, limit: Option<(ReplyLimit, bool)>) {
        match &mut self.kind {
            BlockKind::Text(text) => text.push_str(&self.appended.text),
            BlockKind::ToolUse(call) => {
                (call.arguments, call.invalid_arguments) =
                    std::mem::take(&mut self.appended.json).finish(limit);
            }
            BlockKind::Thinking | BlockKind::Other => {}
        }
    }

    fn has_call_id(&self, id: Option<&str>) -> bool {
        matches!(&self.kind, BlockKind::ToolUse(call) if Some(call.id.as_str()) == id)
    }

    /// The complete block; `None` if the API would reject it because it is empty.
    fn to_raw_json(&self) -> Option<Cow<'_, RawValue>> {
        let mut fields: Vec<(&str, Box<RawValue>)> = Vec::new();
        let mut add = |field, text: &String| {
            if !text.is_empty() {
                fields.extend(to_raw_value(text).map(|text| (field, text)));
            }
        };
        add("thinking", &self.appended.thinking);
        add("signature", &self.appended.signature);
        match &self.kind {
            BlockKind::Text(text) if text.trim().is_empty() => return None,
            BlockKind::Text(text) if !self.appended.text.is_empty() => add("text", text),
            // A streamed block may start without `input`, and a truncated one has only part of it.
            BlockKind::ToolUse(call) => {
                fields.push(("input", RawValue::to_owned(&call.arguments)));
                // A model may invent a name. Signatures cover only the thinking.
                let name = tool_call_codec::sanitize_name(&call.name);
                if name != call.name {
                    fields.extend(to_raw_value(&name).map(|name| ("name", name)));
                }
            }
            BlockKind::Other if !self.appended.json.is_blank() => {
                fields.push(("input", RawValue::to_owned(&self.appended.json.object())));
            }
            BlockKind::Text(_) | BlockKind::Thinking | BlockKind::Other => {}
        }
        if fields.is_empty() {
            return Some(Cow::Borrowed(&self.start));
        }
        let mut block: IndexMap<Cow<'_, str>, Box<RawValue>> =
            serde_json::from_str(self.start.get()).ok()?;
        block.extend(
            fields
                .into_iter()
                .map(|(name, value)| (Cow::Borrowed(name), value)),
        );
        to_raw_value(&block).ok().map(Cow::Owned)
    }
}

/// The blocks as the service sent them, with unique ids for calls to which it gave the same id: it rejects duplicates.
pub fn with_unique_ids<'a>(blocks: &'a RawValue, calls: &[ToolCall]) -> Cow<'a, RawValue> {
    if calls.iter().all(|call| call.provider_id.is_empty()) {
        return Cow::Borrowed(blocks);
    }
    let renamed = || {
        let mut calls = calls.iter();
        let mut all: Vec<Cow<'_, RawValue>> = Vec::new();
        for block in serde_json::from_str::<Vec<&RawValue>>(blocks.get()).ok()? {
            let parsed: BlockIn<'_> = serde_json::from_str(block.get()).ok()?;
            let call = match parsed.kind.as_str() {
                "tool_use" => calls.next().filter(|call| !call.provider_id.is_empty()),
                _ => None,
            };
            all.push(match call {
                None => Cow::Borrowed(block),
                Some(call) => {
                    let mut fields: IndexMap<Cow<'_, str>, Box<RawValue>> =
                        serde_json::from_str(block.get()).ok()?;
                    fields.insert(Cow::Borrowed("id"), to_raw_value(&call.id).ok()?);
                    Cow::Owned(to_raw_value(&fields).ok()?)
                }
            });
        }
        to_raw_value(&all).ok()
    };
    renamed().map_or(Cow::Borrowed(blocks), Cow::Owned)
}
