//! The replies of OpenAI's Responses API, whole or as a stream of events.

use std::borrow::Cow;

use indexmap::IndexMap;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::{RawValue, to_raw_value};

use crate::domain::message::{AssistantMessage, Echo, ToolCall};
use crate::domain::usage::TokenUsage;
use crate::providers::call_pieces::{self, ArgumentText};
use crate::providers::echo::ReplyOrigin;
use crate::providers::http_client::{BodyPart, PartError};
use crate::providers::openai_fields::service_tier_delta;
use crate::providers::reply_builder::{ReplyBuilder, append};
use crate::providers::stop_reason::{self, ReplyContent};
use crate::providers::stream_decoder::StreamFormat;
use crate::providers::token_counts::{self, Lenient, TokenCount, TokenCounts, TokenDetails};
use crate::providers::{Delta, ProviderError, Reply, error_mapping, tool_call_codec, wire_json};

/// A whole response, which the last event of a stream carries too.
#[derive(Deserialize)]
struct ResponseIn<'a> {
    status: Option<String>,
    model: Option<String>,
    #[serde(borrow)]
    output: Option<Vec<&'a RawValue>>,
    /// All of the text, where a gateway sends it beside the output or instead of it.
    output_text: Option<String>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
    #[serde(default)]
    incomplete_details: Lenient<IncompleteDetails>,
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
    #[serde(default)]
    output_index: Lenient<u64>,
    #[serde(borrow)]
    item_id: Option<Cow<'a, str>>,
    #[serde(default)]
    content_index: Lenient<u64>,
    #[serde(default)]
    summary_index: Lenient<u64>,
    #[serde(borrow)]
    delta: Option<&'a RawValue>,
    text: Option<String>,
    refusal: Option<String>,
    #[serde(default)]
    part: Lenient<PartIn>,
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
    #[serde(borrow)]
    item: Option<&'a RawValue>,
    #[serde(borrow)]
    response: Option<&'a RawValue>,
    /// Of a whole response that came as the only event.
    #[serde(borrow)]
    output: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct ItemIn<'a> {
    #[serde(borrow, rename = "type", default)]
    kind: Cow<'a, str>,
    #[serde(borrow)]
    id: Option<Cow<'a, str>>,
    #[serde(borrow)]
    call_id: Option<Cow<'a, str>>,
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
    #[serde(rename = "type", default)]
    kind: String,
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
    Message(EmittedText),
    Call {
        call: ToolCall,
        argument_text: ArgumentText,
    },
    /// Whether any of its text was emitted.
    Reasoning(bool),
    Other,
}

/// The bytes of a message's text that were emitted, by the index of their part.
#[derive(Default)]
struct EmittedText(Vec<(u64, usize)>);

impl EmittedText {
    fn part(&mut self, index: Option<u64>) -> &mut usize {
        let last = self.0.last().map_or(0, |(index, _)| *index);
        let index = index.unwrap_or(last);
        let position = self.0.iter().position(|(part, _)| *part == index);
        let position = position.unwrap_or_else(|| {
            self.0.push((index, 0));
            self.0.len() - 1
        });
        &mut self.0[position].1
    }

    fn total(&self) -> usize {
        self.0.iter().map(|(_, bytes)| bytes).sum()
    }
}

impl ItemKind {
    fn new_message() -> Self {
        Self::Message(EmittedText::default())
    }

    fn new_call() -> Self {
        Self::Call {
            call: ToolCall {
                id: String::new(),
                provider_id: String::new(),
                name: String::new(),
                arguments: crate::domain::message::empty_arguments(),
                invalid_arguments: None,
            },
            argument_text: ArgumentText::default(),
        }
    }

    fn is_same(&self, other: &Self) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
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
            BodyPart::Message { event, data } => self.push_event(event, data, deltas),
            BodyPart::Document(text) => {
                self.push_response(text, deltas)?;
                Ok(true)
            }
            // Only the last event is missing.
            BodyPart::Done => {
                Ok(!self.items.is_empty() && self.items.iter().all(|it| it.raw.is_some()))
            }
            BodyPart::End => Ok(false),
        }
    }

    fn has_final_usage(&self) -> bool {
        self.is_finished && self.usage.is_some()
    }

    fn finish(mut self, origin: ReplyOrigin<'_>) -> Result<Reply, ProviderError> {
        let limit = stop_reason::limit(self.stop_reason.as_deref());
        let is_call = |item: &OutputItem| matches!(item.kind, ItemKind::Call { .. });
        let last_call = self.items.iter().rposition(is_call);
        let mut tool_calls = Vec::new();
        for (position, item) in self.items.iter_mut().enumerate() {
            if let ItemKind::Call {
                call,
                argument_text,
            } = &mut item.kind
            {
                let limit = limit.map(|limit| (limit, Some(position) == last_call));
                (call.arguments, call.invalid_arguments) =
                    std::mem::take(argument_text).finish(limit);
                tool_calls.push(call.clone());
            }
        }
        if self.text.is_empty() && tool_calls.is_empty() {
            // All that there is.
            self.text = std::mem::take(&mut self.commentary);
        }
        let content = ReplyContent {
            has_text: !self.text.is_empty(),
            has_calls: !tool_calls.is_empty(),
            is_refused: self.is_refused,
        };
        let end = stop_reason::outcome(self.stop_reason.as_deref(), content)?;
        let is_empty = !content.has_text && !content.has_calls;
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
        name: &str,
        text: &str,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<bool, PartError> {
        let mut event: Event<'_> = wire_json::parse(text)?;
        if event.kind.is_empty() && event.output.is_some() {
            self.push_response(text, deltas)?;
            return Ok(true);
        }
        if event.kind.is_empty() {
            event.kind = Cow::Borrowed(name);
        }
        match event.kind.as_ref() {
            "response.output_item.added" | "response.output_item.done" => {
                if let Some(item) = event.item {
                    let is_done = event.kind.ends_with("done");
                    self.push_item(event.output_index.0, item, is_done, deltas)?;
                }
            }
            "response.output_text.delta" | "response.refusal.delta" => {
                let delta: String = match event.delta {
                    Some(delta) => wire_json::parse(delta.get())?,
                    None => return Ok(false),
                };
                self.is_refused |= event.kind == "response.refusal.delta" && !delta.is_empty();
                let item = self.find_or_start(&event, ItemKind::new_message())?;
                if let ItemKind::Message(emitted) = &mut item.kind {
                    *emitted.part(event.content_index.0) += delta.len();
                }
                let is_commentary = item.is_commentary;
                self.push_text(delta, is_commentary, deltas);
            }
            "response.output_text.done"
            | "response.refusal.done"
            | "response.content_part.added"
            | "response.content_part.done" => self.push_part_so_far(event, deltas)?,
            "response.reasoning_summary_text.delta" | "response.reasoning_text.delta" => {
                if let Some(delta) = event.delta {
                    let delta: String = wire_json::parse(delta.get())?;
                    let item = self.find_or_start(&event, ItemKind::Reasoning(false))?;
                    emit_reasoning(item, &delta, deltas);
                }
            }
            // Each part of a summary is a paragraph.
            "response.reasoning_summary_part.added" if event.summary_index.0 > Some(0) => {
                deltas(Delta::Reasoning("\n\n"));
            }
            "response.function_call_arguments.delta" => {
                if let Some(delta) = event.delta {
                    let delta = call_pieces::argument_text(delta);
                    let item = self.find_or_start(&event, ItemKind::new_call())?;
                    if let ItemKind::Call { argument_text, .. } = &mut item.kind {
                        argument_text.push(&delta);
                    }
                }
            }
            "response.function_call_arguments.done" => {
                if let Some(arguments) = event.arguments {
                    let arguments = call_pieces::argument_text(arguments);
                    let item = self.find_or_start(&event, ItemKind::new_call())?;
                    if let ItemKind::Call { argument_text, .. } = &mut item.kind {
                        argument_text.push_whole(arguments);
                    }
                }
            }
            "response.completed"
            | "response.done"
            | "response.incomplete"
            | "response.failed"
            | "response.cancelled" => {
                if let Some(response) = event.response {
                    self.push_response(response.get(), deltas)?;
                }
                let has_no_status = matches!(
                    self.stop_reason.as_deref(),
                    None | Some("in_progress" | "queued" | "completed" | "incomplete")
                );
                match event.kind.as_ref() {
                    "response.failed" | "response.cancelled" => {
                        return Err(error_mapping::from_error_body(text).into());
                    }
                    // The event says more than a status that a gateway left as it was.
                    "response.incomplete" if has_no_status => {
                        self.stop_reason = Some("incomplete".to_owned());
                    }
                    "response.completed" if has_no_status => {
                        self.stop_reason = Some("completed".to_owned());
                    }
                    _ => {}
                }
                return Ok(true);
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
        let error = response.error.map(RawValue::get);
        if let Some(error) = error.filter(|error| !error_mapping::is_blank_error(error)) {
            return Err(error_mapping::from_error_body(error).into());
        }
        if response.status.as_deref() == Some("failed") {
            return Err(error_mapping::from_error_body(text).into());
        }
        self.model = response.model.or(self.model.take());
        let reason = response
            .incomplete_details
            .0
            .and_then(|details| details.reason);
        self.stop_reason = stop_reason::known(reason).or(response.status);
        self.push_output(response.output.unwrap_or_default(), deltas)?;
        if self.text.is_empty() {
            self.push_text(response.output_text.unwrap_or_default(), false, deltas);
        }
        Ok(())
    }

    /// Adds all items. Those that have arrived already are known by their id, else by their order among those of their kind.
    fn push_output(
        &mut self,
        output: Vec<&RawValue>,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<(), PartError> {
        let earlier = self.items.len();
        let mut is_taken = vec![false; earlier];
        for (position, raw) in output.into_iter().enumerate() {
            let parsed: ItemIn<'_> = wire_json::parse(raw.get())?;
            let kind = parsed.item_kind();
            let candidates = self.items[..earlier].iter().enumerate();
            let candidates = candidates.filter(|(at, it)| !is_taken[*at] && it.kind.is_same(&kind));
            let candidates: Vec<usize> = candidates.map(|(at, _)| at).collect();
            let has_id = |at: &&usize| parsed.is_item(&self.items[**at]);
            let may_be = |at: &&usize| parsed.may_be(&self.items[**at]);
            let found = candidates.iter().find(has_id);
            let found = found.or_else(|| candidates.iter().find(may_be)).copied();
            match found {
                Some(at) => {
                    is_taken[at] = true;
                    if self.items[at].raw.is_none() {
                        self.complete_item(at, parsed, raw, deltas)?;
                    }
                }
                None => {
                    let index = Some(position as u64);
                    let at = start_item(&mut self.items, index, &parsed)?;
                    self.complete_item(at, parsed, raw, deltas)?;
                }
            }
        }
        Ok(())
    }

    /// Adds what a part of a message has so far, except what deltas have emitted. Some services send no deltas.
    fn push_part_so_far(
        &mut self,
        event: Event<'_>,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<(), PartError> {
        let part = event.part.0.as_ref();
        let refusal = event
            .refusal
            .as_ref()
            .or(part.and_then(|it| it.refusal.as_ref()));
        let is_reasoning = part.is_some_and(|part| part.kind.contains("reasoning"));
        let text = event.text.as_ref().or(part.and_then(|it| it.text.as_ref()));
        let text = match (refusal.filter(|it| !it.is_empty()), text) {
            (Some(refusal), _) => {
                self.is_refused = true;
                refusal.clone()
            }
            (None, Some(text)) if !is_reasoning => text.clone(),
            (None, _) => return Ok(()),
        };
        let content_index = event.content_index.0;
        let item = self.find_or_start(&event, ItemKind::new_message())?;
        let is_commentary = item.is_commentary;
        if let ItemKind::Message(emitted) = &mut item.kind {
            let emitted = emitted.part(content_index);
            if let Some(rest) = text.get(*emitted..).map(str::to_owned) {
                *emitted = text.len();
                self.push_text(rest, is_commentary, deltas);
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
        let kind = parsed.item_kind();
        if let (ItemKind::Reasoning(_), false) = (&kind, is_done) {
            deltas(Delta::ReasoningStarted);
        }
        let same_kind = |item: &&OutputItem| item.kind.is_same(&kind);
        let by_id = |item: &OutputItem| same_kind(&item) && parsed.is_item(item);
        let by_index = |item: &OutputItem| {
            let is_index = index.is_some() && item.index == index;
            let may_be = same_kind(&item) && item.raw.is_none() && parsed.may_be(item);
            may_be && (is_index || index.is_none() && is_done)
        };
        let found = self.items.iter().rposition(by_id);
        let found = found.or_else(|| self.items.iter().rposition(by_index));
        match (found, is_done) {
            (Some(at), true) => self.complete_item(at, parsed, raw, deltas),
            // A repeat.
            (Some(at), false) if parsed.is_item(&self.items[at]) => Ok(()),
            (_, is_done) => {
                let at = start_item(&mut self.items, index, &parsed)?;
                match is_done {
                    true => self.complete_item(at, parsed, raw, deltas),
                    false => self.update_item(at, parsed, None, deltas),
                }
            }
        }
    }

    fn complete_item(
        &mut self,
        at: usize,
        parsed: ItemIn<'_>,
        raw: &RawValue,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<(), PartError> {
        self.update_item(at, parsed, Some(raw), deltas)
    }

    /// Updates an item by a report of it. `done` is the report if it is the last.
    fn update_item(
        &mut self,
        at: usize,
        parsed: ItemIn<'_>,
        done: Option<&RawValue>,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<(), PartError> {
        let item = &mut self.items[at];
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
            let call_id = stop_reason::known(parsed.call_id.map(Cow::into_owned));
            call.id = call_id.unwrap_or(std::mem::take(&mut call.id));
            call.name = parsed.name.unwrap_or(std::mem::take(&mut call.name));
            if let Some(arguments) = parsed.arguments {
                argument_text.push_whole(call_pieces::argument_text(arguments));
            }
        }
        if let Some(raw) = done {
            item.raw = Some(raw.to_owned());
            if let ItemKind::Reasoning(false) = item.kind {
                let parts = parsed.summary.or(parsed.content);
                let parts = parts.and_then(|parts| wire_json::parse(parts.get()).ok());
                let parts: Vec<PartIn> = parts.unwrap_or_default();
                let texts: Vec<_> = parts.into_iter().filter_map(|part| part.text).collect();
                emit_reasoning(item, &texts.join("\n\n"), deltas);
            }
        }
        let Some(content) = parsed.content.filter(|_| is_message) else {
            return Ok(());
        };
        let text = match wire_json::parse::<Vec<PartIn>>(content.get()) {
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
        let total = emitted.total();
        let rest = text.get(total..).map(str::to_owned);
        *emitted.part(None) += rest.as_ref().map_or(0, String::len);
        let before = text
            .get(..total)
            .filter(|_| is_commentary && !was_commentary);
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

    /// The item that the event is about: by its id, else by its index, else the last of the kind.
    fn find_or_start(
        &mut self,
        event: &Event<'_>,
        kind: ItemKind,
    ) -> Result<&mut OutputItem, ProviderError> {
        let id = event.item_id.as_deref().unwrap_or_default();
        let index = event.output_index.0;
        let find = |is_match: &dyn Fn(&OutputItem) -> bool| {
            let is_found = |item: &OutputItem| item.kind.is_same(&kind) && is_match(item);
            self.items.iter().rposition(is_found)
        };
        let found = find(&|item| item.has_id(id))
            .or_else(|| find(&|item| index.is_some() && item.index == index))
            .or_else(|| find(&|item| index.is_none() && (id.is_empty() || item.id.is_empty())));
        let at = match found {
            Some(at) => at,
            None => push_item(&mut self.items, index, id, kind)?,
        };
        Ok(&mut self.items[at])
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
        token_counts::update(&mut self.usage, usage, deltas);
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

impl ItemIn<'_> {
    fn item_kind(&self) -> ItemKind {
        match self.kind.as_ref() {
            "message" => ItemKind::new_message(),
            "function_call" => ItemKind::new_call(),
            "reasoning" => ItemKind::Reasoning(false),
            _ => ItemKind::Other,
        }
    }

    /// Whether this is a report of the item, by its ids.
    fn is_item(&self, item: &OutputItem) -> bool {
        let call_id = self.call_id.as_deref().unwrap_or_default();
        item.has_id(self.id.as_deref().unwrap_or_default()) && self.may_be(item)
            || !stop_reason::is_placeholder(call_id) && item.call_id() == Some(call_id)
    }

    /// Whether nothing tells it apart from the item: two calls have different ids.
    fn may_be(&self, item: &OutputItem) -> bool {
        let call_id = self.call_id.as_deref().unwrap_or_default();
        let other_id = item.call_id().unwrap_or_default();
        let is_open = [call_id, other_id]
            .into_iter()
            .any(stop_reason::is_placeholder);
        is_open || call_id == other_id
    }
}

impl OutputItem {
    /// Some services name a call by its own id.
    fn has_id(&self, id: &str) -> bool {
        !stop_reason::is_placeholder(id) && (self.id == id || self.call_id() == Some(id))
    }

    fn call_id(&self) -> Option<&str> {
        match &self.kind {
            ItemKind::Call { call, .. } => Some(&call.id),
            _ => None,
        }
    }

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

/// Starts the item that is reported, and returns its position.
fn start_item(
    items: &mut Vec<OutputItem>,
    index: Option<u64>,
    parsed: &ItemIn<'_>,
) -> Result<usize, ProviderError> {
    let id = parsed.id.as_deref().unwrap_or_default();
    push_item(items, index, id, parsed.item_kind())
}

fn push_item(
    items: &mut Vec<OutputItem>,
    index: Option<u64>,
    id: &str,
    kind: ItemKind,
) -> Result<usize, ProviderError> {
    tool_call_codec::check_call_count(items.len() + 1)?;
    items.push(OutputItem {
        index,
        id: id.to_owned(),
        kind,
        raw: None,
        has_extra_fields: false,
        is_commentary: false,
    });
    Ok(items.len() - 1)
}
