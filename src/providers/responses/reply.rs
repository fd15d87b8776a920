//! The replies of OpenAI's Responses API, whole or as a stream of events. Knows no request and no HTTP.

use std::borrow::Cow;

use indexmap::IndexMap;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::{RawValue, to_raw_value};

use crate::domain::message::{AssistantMessage, Echo, ToolCall};
use crate::domain::usage::TokenUsage;
use crate::providers::counts::{self, Count, Counts, Details, Lenient};
use crate::providers::echo::Origin;
use crate::providers::lines::Format;
use crate::providers::openai::billed;
use crate::providers::reply_builder::ReplyBuilder;
use crate::providers::wire::Part;
use crate::providers::{Category, Delta, End, ProviderError, Reply, calls, refusal, wire};

/// A whole response, and what the last event of a stream carries.
#[derive(Deserialize)]
struct Whole<'a> {
    status: Option<String>,
    model: Option<String>,
    #[serde(borrow)]
    output: Option<Vec<&'a RawValue>>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
    incomplete_details: Option<Incomplete>,
    #[serde(default)]
    usage: Lenient<UsageIn>,
    #[serde(default)]
    service_tier: Lenient<String>,
}

#[derive(Deserialize)]
struct Incomplete {
    reason: Option<String>,
}

/// One event. What only some kinds have is read when the kind is known.
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
    phase: Option<IgnoredAny>,
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
    input_tokens: Count,
    #[serde(default)]
    output_tokens: Count,
    #[serde(default)]
    input_tokens_details: Lenient<Details>,
    #[serde(default)]
    output_tokens_details: Lenient<Details>,
}

impl UsageIn {
    fn usage(self) -> Option<TokenUsage> {
        let counts = Counts {
            input: self.input_tokens,
            output: self.output_tokens,
            input_details: self.input_tokens_details,
            output_details: self.output_tokens_details,
        };
        counts.usage()
    }
}

/// A reply as far as it has come.
#[derive(Default)]
pub struct Heard {
    items: Vec<Item>,
    text: String,
    usage: Option<TokenUsage>,
    has_refused: bool,
    /// Whether nothing more comes.
    is_over: bool,
    stop_reason: Option<String>,
    model: Option<String>,
}

/// An output item as far as it has come.
struct Item {
    index: Option<u64>,
    id: String,
    kind: Kind,
    /// The item, when it is complete.
    whole: Option<Box<RawValue>>,
    /// Whether it has fields that text and calls do not keep.
    is_rich: bool,
}

enum Kind {
    /// How much of its text was passed on.
    Message(usize),
    Call {
        call: ToolCall,
        /// The arguments as they came in pieces.
        pieces: String,
    },
    /// Whether any of its text was passed on.
    Reasoning(bool),
    Other,
}

impl Kind {
    fn call() -> Self {
        Self::Call {
            call: ToolCall {
                id: String::new(),
                provider_id: String::new(),
                name: String::new(),
                arguments: crate::domain::message::no_arguments(),
            },
            pieces: String::new(),
        }
    }
}

impl ReplyBuilder for Heard {
    const FORMAT: Format = Format::Sse;

    fn part(
        &mut self,
        part: Part<'_>,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<bool, ProviderError> {
        match part {
            Part::Message(data) if data.trim() == "[DONE]" => Ok(true),
            Part::Message(text) => self.event(text, deltas),
            Part::Whole(text) => {
                self.whole(text, deltas)?;
                Ok(true)
            }
        }
    }

    fn is_counted(&self) -> bool {
        self.is_over && self.usage.is_some()
    }

    fn reply(mut self, origin: Origin<'_>) -> Result<Reply, ProviderError> {
        let mut tool_calls = Vec::new();
        for item in &mut self.items {
            if let Kind::Call { call, pieces } = &mut item.kind {
                if !pieces.is_empty() {
                    call.arguments = calls::arguments_from_text(pieces);
                }
                tool_calls.push(call.clone());
            }
        }
        let is_empty = self.text.is_empty() && tool_calls.is_empty();
        let end = match self.stop_reason.as_deref() {
            _ if !tool_calls.is_empty() => End::Answer,
            _ if self.has_refused => End::Refused,
            _ if !is_empty => End::Answer,
            Some("completed") => End::Answer,
            Some("max_output_tokens") => End::Truncated,
            Some("content_filter") => End::Refused,
            _ => {
                let why = "response contains no content";
                return Err(ProviderError::new(Category::Server, why));
            }
        };
        let filled = calls::fill_ids(&mut tool_calls);
        let echo = match is_empty || filled || self.is_plain() {
            true => None,
            false => self.echo(origin),
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
            end,
        })
    }
}

impl Heard {
    fn event(
        &mut self,
        text: &str,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<bool, ProviderError> {
        let event: Event<'_> = wire::read(text)?;
        if event.error.is_some() || event.kind == "error" {
            return Err(refusal::in_reply(text));
        }
        match event.kind.as_ref() {
            "response.output_item.added" | "response.output_item.done" => {
                if let Some(item) = event.item {
                    let is_done = event.kind.ends_with("done");
                    self.item(event.output_index, item, is_done, deltas)?;
                }
            }
            "response.output_text.delta" | "response.refusal.delta" => {
                let delta: String = match event.delta {
                    Some(delta) => wire::read(delta.get())?,
                    None => return Ok(false),
                };
                self.has_refused |= event.kind == "response.refusal.delta" && !delta.is_empty();
                let item = self.find(&event, || Kind::Message(0))?;
                if let Kind::Message(told) = &mut item.kind {
                    *told += delta.len();
                }
                self.tell(delta, deltas);
            }
            "response.reasoning_summary_text.delta" | "response.reasoning_text.delta" => {
                if let Some(delta) = event.delta {
                    let delta: String = wire::read(delta.get())?;
                    let item = self.find(&event, || Kind::Reasoning(false))?;
                    reason(item, &delta, deltas);
                }
            }
            // The parts of a summary are paragraphs.
            "response.reasoning_summary_part.added" if event.summary_index > Some(0) => {
                deltas(Delta::Reasoning("\n\n"));
            }
            "response.function_call_arguments.delta" => {
                if let Some(delta) = event.delta {
                    let delta: String = wire::read(delta.get())?;
                    let item = self.find(&event, Kind::call)?;
                    if let Kind::Call { pieces, .. } = &mut item.kind {
                        wire::append(pieces, delta);
                    }
                }
            }
            "response.function_call_arguments.done" => {
                if let Some(whole) = event.arguments {
                    let whole = calls::arguments_from_json(Some(whole));
                    let item = self.find(&event, Kind::call)?;
                    if let Kind::Call { pieces, .. } = &mut item.kind {
                        whole.get().clone_into(pieces);
                    }
                }
            }
            "response.completed" | "response.incomplete" | "response.failed" => {
                if let Some(response) = event.response {
                    self.whole(response.get(), deltas)?;
                }
                return match event.kind.as_ref() {
                    "response.failed" => Err(refusal::in_reply(text)),
                    _ => Ok(true),
                };
            }
            // The ends of parts, and what may come.
            _ => {}
        }
        Ok(false)
    }

    /// Takes a whole response, of which the items may have come already.
    fn whole(
        &mut self,
        text: &str,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<(), ProviderError> {
        self.is_over = true;
        let whole: Whole<'_> = wire::read(text).inspect_err(|_| {
            self.report(counts::of_unread(text).and_then(UsageIn::usage), deltas);
        })?;
        if let Some(billed) = billed(whole.service_tier) {
            deltas(billed);
        }
        self.report(whole.usage.0.and_then(UsageIn::usage), deltas);
        if let Some(error) = whole.error {
            return Err(refusal::in_reply(error.get()));
        }
        if whole.status.as_deref() == Some("failed") {
            return Err(refusal::in_reply(text));
        }
        self.model = whole.model.or(self.model.take());
        let reason = whole.incomplete_details.and_then(|details| details.reason);
        self.stop_reason = reason.or(whole.status);
        for (place, item) in whole.output.into_iter().flatten().enumerate() {
            let is_known = self.items.get(place);
            if is_known.is_none_or(|item| item.whole.is_none()) {
                let index = is_known.map_or(Some(place as u64), |item| item.index);
                self.item(index, item, true, deltas)?;
            }
        }
        Ok(())
    }

    /// Takes an item: its beginning, or the whole of it.
    fn item(
        &mut self,
        index: Option<u64>,
        raw: &RawValue,
        is_done: bool,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<(), ProviderError> {
        let read: ItemIn<'_> = wire::read(raw.get())?;
        let id = read.id.unwrap_or_default();
        let kind = match read.kind.as_ref() {
            "message" => Kind::Message(0),
            "function_call" => Kind::call(),
            "reasoning" => Kind::Reasoning(false),
            _ => Kind::Other,
        };
        if let (Kind::Reasoning(_), false) = (&kind, is_done) {
            deltas(Delta::ReasoningStarted);
        }
        let item = match is_done {
            true => at(&mut self.items, index, &id, kind)?,
            false => begun(&mut self.items, index, &id, kind)?,
        };
        let is_message = matches!(item.kind, Kind::Message(_));
        item.is_rich = !matches!(read.kind.as_ref(), "message" | "function_call")
            || read.phase.is_some()
            || read.namespace.is_some()
            || read.caller.is_some();
        if let Kind::Call { call, pieces } = &mut item.kind {
            call.id = read.call_id.unwrap_or_default();
            call.name = read.name.unwrap_or_default();
            if let Some(arguments) = read.arguments.filter(|_| is_done) {
                call.arguments = calls::arguments_from_json(Some(arguments));
                pieces.clear();
            }
        }
        if is_done {
            item.whole = Some(raw.to_owned());
            if let Kind::Reasoning(false) = item.kind {
                let parts = read.summary.or(read.content);
                let parts = parts.and_then(|parts| serde_json::from_str(parts.get()).ok());
                let parts: Vec<PartIn> = parts.unwrap_or_default();
                let texts: Vec<_> = parts.into_iter().filter_map(|part| part.text).collect();
                reason(item, &texts.join("\n\n"), deltas);
            }
        }
        let Some(content) = read.content.filter(|_| is_message && is_done) else {
            return Ok(());
        };
        let text = match serde_json::from_str::<Vec<PartIn>>(content.get()) {
            Ok(parts) => parts.into_iter().fold(String::new(), |mut text, part| {
                let refusal = part.refusal.unwrap_or_default();
                self.has_refused |= !refusal.is_empty();
                wire::append(&mut text, part.text.unwrap_or_default());
                wire::append(&mut text, refusal);
                text
            }),
            Err(_) => wire::read::<Option<String>>(content.get())?.unwrap_or_default(),
        };
        // What deltas told stands; a service may send none.
        if let Kind::Message(told) = &mut item.kind
            && let Some(rest) = text.get(*told..).map(str::to_owned)
        {
            *told = text.len();
            self.tell(rest, deltas);
        }
        Ok(())
    }

    /// The item that an event is of.
    fn find(
        &mut self,
        event: &Event<'_>,
        new: impl FnOnce() -> Kind,
    ) -> Result<&mut Item, ProviderError> {
        let id = event.item_id.as_deref().unwrap_or_default();
        at(&mut self.items, event.output_index, id, new())
    }

    fn tell(&mut self, text: String, deltas: &mut dyn FnMut(Delta<'_>)) {
        if !text.is_empty() {
            deltas(Delta::Text(&text));
            wire::append(&mut self.text, text);
        }
    }

    /// Keeps what the service has reported so far.
    fn report(&mut self, usage: Option<TokenUsage>, deltas: &mut dyn FnMut(Delta<'_>)) {
        if let Some(usage) = usage {
            deltas(Delta::Usage(usage));
        }
        self.usage = usage;
    }

    /// Whether text and calls say all of it: one message, then calls.
    fn is_plain(&self) -> bool {
        let is_message = |item: &Item| matches!(item.kind, Kind::Message(_));
        let after_first = self.items.iter().skip(1);
        !self.items.iter().any(|item| item.is_rich) && !after_first.into_iter().any(is_message)
    }

    /// All items as the service sent them, but for what it would not take back; none where one of them never came whole.
    fn echo(&self, origin: Origin<'_>) -> Option<Echo> {
        // Thoughts must stand before what they led to: the service refuses those that led to nothing.
        let is_end = |item: &Item| !matches!(item.kind, Kind::Reasoning(_) | Kind::Other);
        let length = self.items.iter().rposition(is_end)? + 1;
        let items: Option<Vec<_>> = self.items[..length].iter().map(Item::taken_back).collect();
        origin.echo(&items?)
    }
}

impl Item {
    /// The item as the service takes it back.
    fn taken_back(&self) -> Option<Cow<'_, RawValue>> {
        let whole = self.whole.as_deref()?;
        let Kind::Call { call, .. } = &self.kind else {
            return Some(Cow::Borrowed(whole));
        };
        let read: ItemIn<'_> = serde_json::from_str(whole.get()).ok()?;
        let (id, name) = (calls::short_id(&call.id), calls::plain_name(&call.name));
        let given: Option<Cow<'_, str>> = read
            .arguments
            .and_then(|arguments| serde_json::from_str(arguments.get()).ok());
        let arguments = call.arguments.get();
        // A cut call has half its arguments, and a model may make up a name.
        let is_fine = given.is_some_and(|given| given.trim() == arguments);
        if is_fine && id == call.id && name == call.name {
            return Some(Cow::Borrowed(whole));
        }
        let fields = [
            ("call_id", &*id),
            ("name", &*name),
            ("arguments", arguments),
        ];
        with(whole, &fields).map(Cow::Owned)
    }
}

/// The items of an echo, with the calls' own ids where the service gave several calls the same: it takes back only
/// different ones.
pub fn items<'a>(echo: &'a RawValue, calls: &[ToolCall]) -> Option<Vec<Cow<'a, RawValue>>> {
    let items: Vec<&RawValue> = serde_json::from_str(echo.get()).ok()?;
    if calls.iter().all(|call| call.provider_id.is_empty()) {
        return Some(items.into_iter().map(Cow::Borrowed).collect());
    }
    let mut calls = calls.iter();
    let renamed = items.into_iter().map(|item| {
        let read: ItemIn<'_> = serde_json::from_str(item.get()).ok()?;
        let call = match read.kind.as_ref() {
            "function_call" => calls.next().filter(|call| !call.provider_id.is_empty()),
            _ => None,
        };
        match call {
            None => Some(Cow::Borrowed(item)),
            Some(call) => with(item, &[("call_id", &calls::short_id(&call.id))]).map(Cow::Owned),
        }
    });
    renamed.collect()
}

/// An item with other texts in these fields.
fn with(item: &RawValue, texts: &[(&'static str, &str)]) -> Option<Box<RawValue>> {
    let mut fields: IndexMap<Cow<'_, str>, Box<RawValue>> =
        serde_json::from_str(item.get()).ok()?;
    for (field, text) in texts {
        fields.insert(Cow::Borrowed(*field), to_raw_value(text).ok()?);
    }
    to_raw_value(&fields).ok()
}

/// Passes on what a model thinks.
fn reason(item: &mut Item, text: &str, deltas: &mut dyn FnMut(Delta<'_>)) {
    if let Kind::Reasoning(is_told) = &mut item.kind
        && !text.is_empty()
    {
        *is_told = true;
        deltas(Delta::Reasoning(text));
    }
}

/// The item of this place or id, begun as `kind` where it is new. Some servers give no places.
fn at<'a>(
    items: &'a mut Vec<Item>,
    index: Option<u64>,
    id: &str,
    kind: Kind,
) -> Result<&'a mut Item, ProviderError> {
    let found = match index {
        Some(_) => items.iter().rposition(|item| item.index == index),
        None => items.iter().rposition(|item| item.id == id),
    };
    match found {
        Some(place) => Ok(&mut items[place]),
        None => begun(items, index, id, kind),
    }
}

/// A new item.
fn begun<'a>(
    items: &'a mut Vec<Item>,
    index: Option<u64>,
    id: &str,
    kind: Kind,
) -> Result<&'a mut Item, ProviderError> {
    calls::check_count(items.len() + 1)?;
    items.push(Item {
        index,
        id: id.to_owned(),
        kind,
        whole: None,
        is_rich: false,
    });
    let last = items.len() - 1;
    Ok(&mut items[last])
}
