//! The replies of OpenAI's chat API, whole or as a stream of events.

use std::fmt;

use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};

use crate::domain::message::{AssistantMessage, Echo};
use crate::domain::usage::{Cost, TokenUsage};
use crate::providers::call_pieces::{CallPiece, CallPieces};
use crate::providers::echo::ReplyOrigin;
use crate::providers::http_client::{BodyPart, PartError};
use crate::providers::openai_chat::content_chunks::{ContentChunks, is_thinking, thinking_text};
use crate::providers::openai_chat::echo_payload::{EchoPayload, Reasoning};
use crate::providers::openai_chat::reasoning_details::ReasoningDetails;
use crate::providers::openai_fields::service_tier_delta;
use crate::providers::reply_builder::{ReplyBuilder, append};
use crate::providers::stop_reason::{self, ReplyContent};
use crate::providers::stream_decoder::StreamFormat;
use crate::providers::token_counts::{self, Lenient, TokenCount, TokenCounts, TokenDetails};
use crate::providers::{
    Delta, ErrorCategory, ProviderError, Reply, error_mapping, tool_call_codec, wire_json,
};

/// No request costs more; a service that says so counts in another unit.
const MAX_COST_USD: f64 = 1e6;

/// One event of a stream, or a whole reply: they differ only in `delta` and `message`.
#[derive(Deserialize)]
struct Chunk<'a> {
    #[serde(borrow)]
    choices: Option<Vec<Choice<'a>>>,
    model: Option<String>,
    #[serde(default)]
    usage: Lenient<UsageIn>,
    #[serde(default)]
    service_tier: Lenient<String>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow)]
    delta: Option<MessageIn<'a>>,
    #[serde(borrow)]
    message: Option<MessageIn<'a>>,
    finish_reason: Option<String>,
    /// Moonshot reports the usage here.
    #[serde(default)]
    usage: Lenient<UsageIn>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct MessageIn<'a> {
    #[serde(default)]
    content: Text,
    refusal: Option<String>,
    reasoning_content: Option<String>,
    reasoning: Option<String>,
    #[serde(borrow)]
    reasoning_details: Option<Vec<&'a RawValue>>,
    #[serde(borrow)]
    tool_calls: Option<Vec<CallIn<'a>>>,
}

impl MessageIn<'_> {
    /// Whether it adds to the reply.
    fn adds(&self) -> bool {
        let texts = [&self.refusal, &self.reasoning_content, &self.reasoning];
        let mut texts = texts.into_iter().flatten();
        !self.content.0.is_empty()
            || !self.content.1.is_empty()
            || texts.any(|text| !text.is_empty())
            || self.tool_calls.as_ref().is_some_and(|all| !all.is_empty())
    }
}

#[derive(Deserialize)]
struct CallIn<'a> {
    #[serde(default)]
    index: Lenient<u64>,
    id: Option<String>,
    #[serde(borrow)]
    function: Option<FunctionIn<'a>>,
    #[serde(borrow)]
    extra_content: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct FunctionIn<'a> {
    name: Option<String>,
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct UsageIn {
    #[serde(default)]
    prompt_tokens: TokenCount,
    #[serde(default)]
    completion_tokens: TokenCount,
    #[serde(default)]
    total_tokens: TokenCount,
    #[serde(default)]
    prompt_tokens_details: Lenient<TokenDetails>,
    #[serde(default)]
    completion_tokens_details: Lenient<TokenDetails>,
    /// OpenRouter, in USD.
    #[serde(default)]
    cost: Lenient<f64>,
    #[serde(default)]
    is_byok: Lenient<bool>,
    #[serde(default)]
    cost_details: Lenient<CostDetails>,
}

#[derive(Deserialize)]
struct CostDetails {
    #[serde(default)]
    upstream_inference_cost: Lenient<f64>,
}

impl UsageIn {
    /// What the request costs: the service's charge, and that of the service behind it if the user has a key of their own there.
    fn cost(&self) -> Option<Cost> {
        let has_own_key = self.is_byok.0 == Some(true);
        let details = self.cost_details.0.as_ref().filter(|_| has_own_key);
        let upstream = details.and_then(|details| details.upstream_inference_cost.0);
        let cost = self.cost.0? + upstream.unwrap_or(0.0);
        (0.0..=MAX_COST_USD)
            .contains(&cost)
            .then(|| Cost::from_usd(cost))
    }

    fn into_usage(self) -> Option<TokenUsage> {
        let counts = TokenCounts {
            input: self.prompt_tokens,
            output: self.completion_tokens,
            total: self.total_tokens,
            input_details: self.prompt_tokens_details,
            output_details: self.completion_tokens_details,
        };
        counts.into_usage()
    }
}

#[derive(Deserialize)]
struct TextPart {
    text: Option<String>,
}

/// The text of a message: a string, null, or (Mistral) a list of chunks, which are kept.
#[derive(Default)]
struct Text(String, Vec<Value>);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextVisitor;
        impl<'de> Visitor<'de> for TextVisitor {
            type Value = Text;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, null or a list of parts")
            }

            fn visit_str<E>(self, text: &str) -> Result<Text, E> {
                Ok(Text(text.to_owned(), Vec::new()))
            }

            fn visit_string<E>(self, text: String) -> Result<Text, E> {
                Ok(Text(text, Vec::new()))
            }

            fn visit_bool<E>(self, _: bool) -> Result<Text, E> {
                Ok(Text::default())
            }

            fn visit_u64<E>(self, number: u64) -> Result<Text, E> {
                Ok(Text(number.to_string(), Vec::new()))
            }

            fn visit_i64<E>(self, number: i64) -> Result<Text, E> {
                Ok(Text(number.to_string(), Vec::new()))
            }

            fn visit_f64<E>(self, number: f64) -> Result<Text, E> {
                Ok(Text(number.to_string(), Vec::new()))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Text, A::Error> {
                let part = TextPart::deserialize(MapAccessDeserializer::new(map))?;
                Ok(Text(part.text.unwrap_or_default(), Vec::new()))
            }

            fn visit_unit<E>(self) -> Result<Text, E> {
                Ok(Text::default())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut parts: A) -> Result<Text, A::Error> {
                let mut content = Text::default();
                while let Some(part) = parts.next_element::<Value>()? {
                    let text = part.as_str().or_else(|| part["text"].as_str());
                    content.0.push_str(text.unwrap_or_default());
                    content.1.push(part);
                }
                Ok(content)
            }
        }
        deserializer.deserialize_any(TextVisitor)
    }
}

#[derive(Default)]
pub struct ChatReplyBuilder {
    text: String,
    reasoning_content: String,
    reasoning: String,
    reasoning_details: ReasoningDetails,
    chunks: ContentChunks,
    calls: CallPieces,
    usage: Option<TokenUsage>,
    has_choices: bool,
    /// Whether a chunk before the first reason for the end had a choice, and whether one after it has added to the reply.
    began_without_reason: bool,
    continues_after_reason: bool,
    has_reason: bool,
    is_refused: bool,
    /// Whether the reply has arrived completely.
    is_finished: bool,
    stop_reason: Option<String>,
    model: Option<String>,
}

impl ReplyBuilder for ChatReplyBuilder {
    const FORMAT: StreamFormat = StreamFormat::Sse;

    fn has_final_usage(&self) -> bool {
        self.is_finished && self.usage.is_some()
    }

    fn push_part(
        &mut self,
        part: BodyPart<'_>,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<bool, PartError> {
        match part {
            BodyPart::Done => {
                self.is_finished = true;
                Ok(true)
            }
            // Some servers send no `[DONE]`. Others send a reason in every chunk, so that it does not tell the end.
            BodyPart::End => {
                let is_end = self.has_reason && !self.continues_after_reason;
                let tells_end = self.began_without_reason || self.usage.is_some();
                self.is_finished |= is_end && tells_end;
                Ok(self.is_finished)
            }
            BodyPart::Message { data: text, .. } | BodyPart::Document(text) => {
                self.is_finished |= matches!(part, BodyPart::Document(_));
                let chunk: Chunk<'_> = wire_json::parse(text).inspect_err(|_| {
                    let usage = token_counts::parse_usage_only(text).and_then(UsageIn::into_usage);
                    self.set_usage(usage, deltas);
                })?;
                self.push_chunk(chunk, matches!(part, BodyPart::Document(_)), deltas)?;
                Ok(false)
            }
        }
    }

    fn finish(mut self, origin: ReplyOrigin<'_>) -> Result<Reply, ProviderError> {
        let error = |message: &str| Err(ProviderError::new(ErrorCategory::Server, message));
        if !self.has_choices {
            return error("response contains no choices");
        }
        let content = ReplyContent {
            has_text: !self.text.is_empty(),
            has_calls: !self.calls.is_empty(),
            is_refused: self.is_refused,
        };
        let end = stop_reason::outcome(self.stop_reason.as_deref(), content)?;
        let limit = stop_reason::limit(self.stop_reason.as_deref());
        let calls = std::mem::take(&mut self.calls).finish(limit);
        let (mut tool_calls, extra_content): (Vec<_>, Vec<_>) = calls.unzip();
        let echo = self.build_echo(origin, &extra_content);
        tool_call_codec::fill_missing_ids(&mut tool_calls);
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

impl ChatReplyBuilder {
    fn push_chunk(
        &mut self,
        chunk: Chunk<'_>,
        is_whole: bool,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<(), ProviderError> {
        self.model = chunk.model.or(self.model.take());
        if let Some(delta) = service_tier_delta(chunk.service_tier) {
            deltas(delta);
        }
        if let Some(usage) = chunk.usage.0 {
            if let Some(cost) = usage.cost() {
                deltas(Delta::Cost(cost));
            }
            self.set_usage(usage.into_usage(), deltas);
        }
        let Some(choice) = chunk.choices.and_then(|choices| choices.into_iter().next()) else {
            return Ok(());
        };
        self.has_choices = true;
        if let Some(usage) = choice.usage.0 {
            self.set_usage(usage.into_usage(), deltas);
        }
        let error = choice.error.map(RawValue::get);
        if let Some(error) = error.filter(|error| !error_mapping::is_blank_error(error)) {
            return Err(error_mapping::from_error_body(error));
        }
        let reason = stop_reason::known(choice.finish_reason);
        let had_reason = self.has_reason;
        self.has_reason |= reason.is_some();
        self.began_without_reason |= !self.has_reason;
        self.stop_reason = reason.or(self.stop_reason.take());
        self.calls.begin_message();
        // A stream may have the whole message so far beside its next piece, or after all pieces.
        let (piece, snapshot) = match is_whole {
            true => (choice.message.or(choice.delta), None),
            false => (choice.delta, choice.message),
        };
        if let Some(message) = piece {
            self.continues_after_reason |= had_reason && message.adds();
            self.push_message(message, is_whole, deltas)?;
        }
        if let Some(message) = snapshot {
            self.push_snapshot(message, had_reason, deltas)?;
        }
        Ok(())
    }

    /// Adds a whole message, or a piece of one.
    fn push_message(
        &mut self,
        mut message: MessageIn<'_>,
        is_whole: bool,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<(), ProviderError> {
        // A refusal has its own field.
        let refusal = message.refusal.take().unwrap_or_default();
        self.is_refused |= !refusal.is_empty();
        let Text(text, chunks) = std::mem::take(&mut message.content);
        self.push_chunks(&text, chunks, deltas);
        for text in [text, refusal] {
            if !text.is_empty() {
                deltas(Delta::Text(&text));
                append(&mut self.text, text);
            }
        }
        self.emit_reasoning(&message, deltas);
        append(
            &mut self.reasoning_content,
            message.reasoning_content.unwrap_or_default(),
        );
        append(&mut self.reasoning, message.reasoning.unwrap_or_default());
        for detail in message.reasoning_details.into_iter().flatten() {
            match is_whole {
                true => self.reasoning_details.push_block(detail),
                false => self.reasoning_details.push_piece(detail),
            }
        }
        for call in message.tool_calls.into_iter().flatten() {
            let piece = CallPiece::from(call);
            match is_whole {
                true => self.calls.push_new(piece)?,
                false => self.calls.push(piece)?,
            }
        }
        Ok(())
    }

    /// Keeps the chunks of a content that thinks, and emits the thinking.
    fn push_chunks(&mut self, text: &str, chunks: Vec<Value>, deltas: &mut dyn FnMut(Delta<'_>)) {
        for chunk in chunks.iter().filter(|chunk| is_thinking(chunk)) {
            match thinking_text(chunk) {
                text if text.is_empty() => {}
                text => deltas(Delta::Reasoning(&text)),
            }
        }
        match chunks.is_empty() {
            true if text.is_empty() => {}
            true => self.chunks.push_text(text),
            false => self.chunks.push(chunks, &self.text),
        }
    }

    /// Adds what a message has that the pieces before it did not have. Some servers send messages instead of pieces.
    fn push_snapshot(
        &mut self,
        mut message: MessageIn<'_>,
        had_reason: bool,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<(), ProviderError> {
        for (position, call) in message.tool_calls.take().into_iter().flatten().enumerate() {
            self.calls.push_snapshot(position, CallPiece::from(call))?;
        }
        for (field, earlier) in [
            (&mut message.reasoning_content, &self.reasoning_content),
            (&mut message.reasoning, &self.reasoning),
        ] {
            *field = field.take().map(|text| rest_of(text, earlier));
        }
        if self.is_refused {
            message.refusal = None;
        }
        if !self.reasoning_details.is_empty() {
            message.reasoning_details = None;
        }
        let Text(text, chunks) = std::mem::take(&mut message.content);
        let is_new = self.text.is_empty() && self.chunks.is_empty();
        let chunks = if is_new { chunks } else { Vec::new() };
        message.content = Text(rest_of(text, &self.text), chunks);
        self.continues_after_reason |= had_reason && message.adds();
        self.push_message(message, false, deltas)
    }

    /// Emits the reasoning. Some servers send the same text in two fields.
    fn emit_reasoning(&mut self, message: &MessageIn<'_>, deltas: &mut dyn FnMut(Delta<'_>)) {
        let fields = [&message.reasoning_content, &message.reasoning];
        let mut texts = fields.into_iter().flatten();
        if let Some(text) = texts.find(|text| !text.is_empty()) {
            deltas(Delta::Reasoning(text));
        } else if self.reasoning_details.is_empty()
            && message
                .reasoning_details
                .as_ref()
                .is_some_and(|all| !all.is_empty())
        {
            // These details are encrypted: readable ones also come as text.
            deltas(Delta::ReasoningStarted);
        }
    }

    fn set_usage(&mut self, usage: Option<TokenUsage>, deltas: &mut dyn FnMut(Delta<'_>)) {
        token_counts::update(&mut self.usage, usage, deltas);
    }

    /// What text and tool calls do not preserve; `None` if there is nothing.
    fn build_echo(
        &self,
        origin: ReplyOrigin<'_>,
        extra_content: &[Option<Box<RawValue>>],
    ) -> Option<Echo> {
        let text = |text: &String| match text.is_empty() {
            true => None,
            false => to_raw_value(text).ok(),
        };
        let reasoning_content = text(&self.reasoning_content);
        let reasoning = text(&self.reasoning);
        let details = match self.reasoning_details.is_empty() {
            true => None,
            false => to_raw_value(self.reasoning_details.blocks()).ok(),
        };
        let content = match self.chunks.is_empty() {
            true => None,
            false => to_raw_value(self.chunks.chunks()).ok(),
        };
        let has_extra = extra_content.iter().any(Option::is_some);
        let has_reasoning = reasoning_content.is_some() || reasoning.is_some() || details.is_some();
        if !has_reasoning && content.is_none() && !has_extra {
            return None;
        }
        let extra = extra_content.iter().map(Option::as_deref);
        let payload = EchoPayload {
            reasoning: Reasoning {
                reasoning_content: reasoning_content.as_deref(),
                reasoning: reasoning.as_deref(),
                reasoning_details: details.as_deref(),
            },
            content: content.as_deref(),
            extra_content: match has_extra {
                true => extra.collect(),
                false => Vec::new(),
            },
        };
        origin.echo(&payload)
    }
}

impl From<CallIn<'_>> for CallPiece {
    fn from(call: CallIn<'_>) -> Self {
        let (name, arguments) = match call.function {
            Some(function) => (function.name, function.arguments),
            None => (None, None),
        };
        Self {
            extra_content: call.extra_content.map(RawValue::to_owned),
            ..Self::new(call.index.0, call.id, name).with_arguments(arguments)
        }
    }
}

/// What a text has after the earlier one that it begins with; the whole text if it begins otherwise.
fn rest_of(text: String, earlier: &str) -> String {
    match text.strip_prefix(earlier) {
        Some(rest) => rest.to_owned(),
        None => text,
    }
}
