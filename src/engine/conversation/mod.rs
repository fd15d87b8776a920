//! The decisions of the loop: what to send, what a reply means, when to give up. Pure: no I/O, no async.

use std::borrow::Cow;
use std::collections::HashSet;

use crate::domain::content::Content;
use crate::domain::context::Compaction;
use crate::domain::message::{AssistantMessage, Message, ToolCall, ToolResult, truncate_to_bytes};
use crate::domain::usage::TokenUsage;
use crate::engine::conversation::loop_guard::{LoopGuard, LoopVerdict};
use crate::engine::conversation::request_messages::RequestMessages;
use crate::engine::conversation::request_size::SentAttachments;
use crate::providers::{Reply, reasoning};

pub mod context_window;
pub mod loop_guard;
pub mod request_messages;
pub mod request_size;

/// A longer id is replaced: it is in every event of its call. Some services put the signature of a thought into an id.
const MAX_CALL_ID_BYTES: usize = 8 << 10;
/// A longer name is cut: no tool has one.
const MAX_TOOL_NAME_BYTES: usize = 256;

#[derive(Debug)]
pub struct Conversation {
    request_messages: RequestMessages,
    /// What the service reported for the last request: the tokens of that request and its reply, and the number of
    /// messages they cover.
    reported_usage: Option<(u64, usize)>,
    turn: u32,
    max_turns: u32,
    /// Calls of one reply that are kept. One more is kept beside these; its result tells the model that it made too
    /// many.
    max_calls: usize,
    call_ids: HashSet<String>,
    loop_guard: LoopGuard,
    is_repaired: bool,
    /// How often a message was changed after it had been sent to the model; part of the prefix of later echoes.
    prefix_changes: u32,
}

/// What a reply means for the run. Each variant holds the message to record.
#[derive(Debug)]
pub enum ReplyAction {
    /// The text is the final one.
    Final(AssistantMessage),
    /// These calls have to be executed; then [`Conversation::push_results`] takes their results.
    Calls(AssistantMessage),
    /// The reply calls tools, but no turn is left to read their results.
    OutOfTurns(AssistantMessage),
}

impl ReplyAction {
    pub fn message(&self) -> &AssistantMessage {
        match self {
            Self::Final(message) | Self::Calls(message) | Self::OutOfTurns(message) => message,
        }
    }
}

impl Conversation {
    /// Starts with the user's message, after the messages of earlier runs.
    pub fn new(
        earlier: Vec<Message>,
        message: Content,
        max_turns: u32,
        max_calls: usize,
        loop_warn: u32,
        loop_stop: u32,
    ) -> Self {
        let mut call_ids = HashSet::new();
        for message in &earlier {
            if let Message::Assistant(reply) = message {
                call_ids.extend(reply.tool_calls.iter().map(|call| call.id.clone()));
            }
        }
        Self {
            request_messages: RequestMessages::new(earlier, message),
            reported_usage: None,
            turn: 0,
            max_turns,
            max_calls,
            call_ids,
            loop_guard: LoopGuard::new(loop_warn, loop_stop),
            is_repaired: false,
            prefix_changes: 0,
        }
    }

    /// Drops the thinking of every reply from message `first` on. To be called if a message before that one is no
    /// longer what the model was sent. Replies that are added later keep their thinking.
    pub fn drop_thinking(&mut self, first: usize) {
        self.prefix_changes += 1;
        reasoning::strip_reasoning(self.request_messages.from_index_mut(first));
    }

    /// Drops all thinking from the first reply on that was written after another prefix (see
    /// [`crate::providers::echo::prefix_hash`]): by another run with another prompt or other tools, or by this run if a
    /// restart found other tools. `prefix` is called only if there is any thinking.
    pub fn drop_foreign_thinking(&mut self, prefix: impl FnOnce() -> u64) {
        let messages = self.messages().iter().enumerate();
        let mut echoes = messages.filter_map(|(index, message)| {
            let Message::Assistant(reply) = message else {
                return None;
            };
            Some((index, reply.echo.as_ref()?.prefix))
        });
        let Some(first_echo) = echoes.next() else {
            return;
        };
        let prefix = prefix();
        let is_foreign = |(index, echo_prefix): &(usize, u64)| {
            let changes = if *index < self.request_messages.prompt_index() {
                0
            } else {
                self.prefix_changes
            };
            echo_prefix.wrapping_sub(prefix) > u64::from(changes)
        };
        let first = std::iter::once(first_echo).chain(echoes).find(is_foreign);
        if let Some((first, _)) = first {
            reasoning::strip_reasoning(self.request_messages.from_index_mut(first));
        }
    }

    /// Stores in a reply's echo the hash of what came before it. `prefix` is called only if the reply has an echo.
    pub fn set_echo_prefix(&self, reply: &mut Reply, prefix: impl FnOnce() -> u64) {
        if let Some(echo) = &mut reply.message.echo {
            echo.prefix = prefix().wrapping_add(u64::from(self.prefix_changes));
        }
    }

    /// Adds a recorded reply that called tools; its results have to follow.
    pub fn restore_reply(&mut self, turn: u32, message: AssistantMessage) {
        self.turn = turn;
        self.call_ids
            .extend(message.tool_calls.iter().map(|call| call.id.clone()));
        self.request_messages.push(Message::Assistant(message));
    }

    /// Adds a message that a client sent to the run.
    pub fn push_message(&mut self, content: Content) {
        self.request_messages.push(Message::User { content });
    }

    pub fn has_turn_left(&self) -> bool {
        self.turn < self.max_turns
    }

    /// Whether the model may correct an invalid final text: once, and only if a turn is left.
    pub fn may_repair(&self) -> bool {
        !self.is_repaired && self.has_turn_left()
    }

    /// Adds a final text that the run does not end with, and the message that the model is sent about it.
    pub fn push_followup(&mut self, turn: u32, reply: AssistantMessage, followup: String) {
        self.turn = turn;
        self.is_repaired = true;
        self.request_messages.push(Message::Assistant(reply));
        self.request_messages.push(Message::user(followup));
    }

    /// The number of the last turn that started.
    pub fn turn(&self) -> u32 {
        self.turn
    }

    /// The run's own user message, as text.
    pub fn task(&self) -> Cow<'_, str> {
        self.request_messages.task()
    }

    /// The messages to send, oldest first.
    pub fn messages(&self) -> &[Message] {
        self.request_messages.as_slice()
    }

    pub fn request_messages(&self) -> &RequestMessages {
        &self.request_messages
    }

    /// Applies a compaction, which must include all that the current one leaves out.
    pub fn compact(&mut self, compaction: Compaction) {
        let first_changed = self.request_messages.apply(compaction);
        self.drop_thinking(first_changed);
        // The report was about another request.
        self.reported_usage = None;
    }

    /// Sets what the service reported for the last reply in the conversation.
    pub fn set_reported_usage(&mut self, tokens: &TokenUsage) {
        let is_reply = |message: &Message| matches!(message, Message::Assistant(_));
        let last = self.messages().iter().rposition(is_reply);
        self.reported_usage = last.and_then(|index| match &self.messages()[index] {
            Message::Assistant(reply) => Some((carried_tokens(tokens, reply), index + 1)),
            _ => None,
        });
    }

    /// The tokens of the next request, whose system prompt and tools have `preamble` bytes. The larger of two values:
    /// an estimate of the whole request, or the reported tokens of the last request plus an estimate of the new
    /// messages.
    pub fn estimate_tokens(&self, preamble: usize, sent: SentAttachments) -> u64 {
        let messages = self.messages();
        let bytes = preamble + request_size::messages_bytes(messages, sent);
        let estimate = request_size::tokens_from_bytes(bytes);
        let reported = self.reported_usage.map_or(0, |(tokens, message_count)| {
            let new_messages = messages.get(message_count..).unwrap_or_default();
            tokens.saturating_add(request_size::tokens_from_bytes(
                request_size::messages_bytes(new_messages, sent),
            ))
        });
        estimate.max(reported)
    }

    /// The number of tool results that the next request adds.
    pub fn results_pending(&self) -> usize {
        let is_user = |message: &&Message| matches!(message, Message::User { .. });
        // Messages to the run come after the results.
        match self.messages().iter().rev().find(|it| !is_user(it)) {
            Some(Message::Tool { tool_results }) => tool_results.len(),
            _ => 0,
        }
    }

    /// Starts the next turn and returns its number, from 1.
    pub fn next_turn(&mut self) -> u32 {
        self.turn += 1;
        self.turn
    }

    /// The turn's request was refused, and is made again.
    pub fn retract_turn(&mut self) {
        self.turn -= 1;
    }

    /// Adds a reply. `has_tools` says whether the request offered any tool; if not, calls in the reply are ignored.
    pub fn push_reply(&mut self, reply: Reply, has_tools: bool) -> ReplyAction {
        let mut message = reply.message;
        // The reply becomes the next message, here or by the caller.
        let message_count = self.messages().len() + 1;
        let usage = reply.usage;
        self.reported_usage =
            usage.map(|tokens| (carried_tokens(&tokens, &message), message_count));
        if !has_tools || message.tool_calls.is_empty() {
            if !message.tool_calls.is_empty() {
                // The echo still contains the calls, which get no results.
                message.echo = None;
                message.tool_calls.clear();
            }
            return ReplyAction::Final(message);
        }
        if message.tool_calls.len() > self.max_calls {
            // Each call that is kept costs a result, events and a part of every later request.
            message
                .tool_calls
                .truncate(self.max_calls.saturating_add(1));
            message.tool_calls.shrink_to_fit();
            message.echo = None;
        }
        for (position, call) in message.tool_calls.iter_mut().enumerate() {
            // A segment of a path cannot be a dot or two.
            if call.id.len() > MAX_CALL_ID_BYTES || matches!(call.id.as_str(), "." | "..") {
                // As if the service had given none. The echo still contains it.
                call.id = String::new();
                message.echo = None;
            }
            if call.name.len() > MAX_TOOL_NAME_BYTES {
                call.name = truncate_to_bytes(&call.name, MAX_TOOL_NAME_BYTES).to_owned();
                message.echo = None;
            }
            self.make_call_id_unique(call, position);
        }
        if self.turn >= self.max_turns {
            return ReplyAction::OutOfTurns(message);
        }
        self.request_messages
            .push(Message::Assistant(message.clone()));
        ReplyAction::Calls(message)
    }

    /// Adds the results of the last calls, in the order of the calls, and a hint if the run repeats itself.
    pub fn push_results(&mut self, mut results: Vec<ToolResult>) -> LoopVerdict {
        let calls = match self.request_messages.as_slice().last() {
            Some(Message::Assistant(reply)) => reply.tool_calls.as_slice(),
            _ => &[],
        };
        let verdict = self.loop_guard.compare(calls, &results);
        if let LoopVerdict::Warn(times) = verdict {
            // The record keeps the results without the hint.
            self.prefix_changes += 1;
            for result in &mut results {
                result.content.push_str(&format!(
                    "\n\n[This call with these arguments has given this result {times} times in a row. \
                     Try something else, or give your final answer.]"
                ));
            }
        }
        let mut message = Message::Tool {
            tool_results: results,
        };
        message.drop_data();
        self.request_messages.push(message);
        verdict
    }

    fn make_call_id_unique(&mut self, call: &mut ToolCall, position: usize) {
        let provider_id = std::mem::take(&mut call.id);
        let mut id = if provider_id.is_empty() {
            format!("call_{}_{position}", self.turn)
        } else {
            provider_id.clone()
        };
        let mut tries = 0;
        while !self.call_ids.insert(id.clone()) {
            tries += 1;
            id = match tries {
                1 => format!("{provider_id}_{}_{position}", self.turn),
                _ => format!("{provider_id}_{}_{position}_{tries}", self.turn),
            };
        }
        if id != provider_id {
            call.provider_id = provider_id;
        }
        call.id = id;
    }
}

/// The tokens of a request and its reply that are part of the next request. Thinking counts only if it is sent back.
fn carried_tokens(tokens: &TokenUsage, reply: &AssistantMessage) -> u64 {
    let dropped = match reply.echo {
        Some(_) => 0,
        None => tokens.reasoning,
    };
    tokens.total().saturating_sub(dropped)
}

#[cfg(test)]
mod tests {
    use super::{Conversation, ReplyAction};
    use crate::domain::message::{
        AssistantMessage, Echo, Message, ToolCall, ToolResult, empty_arguments,
    };
    use crate::engine::conversation::loop_guard::LoopVerdict;
    use crate::providers::Reply;

    fn tool_call_reply(ids: &[&str]) -> Reply {
        let call = |id: &&str| ToolCall {
            id: (*id).to_owned(),
            provider_id: String::new(),
            name: "call_agent".to_owned(),
            arguments: empty_arguments(),
            invalid_arguments: None,
        };
        let tool_calls = ids.iter().map(call).collect();
        let message = AssistantMessage {
            content: "hm".to_owned(),
            tool_calls,
            echo: None,
        };
        Reply {
            message,
            ..Reply::default()
        }
    }

    fn push_same_results(conversation: &mut Conversation, text: &str) -> LoopVerdict {
        let Some(Message::Assistant(reply)) = conversation.messages().last() else {
            panic!("no reply")
        };
        let results = reply.tool_calls.iter();
        let results = results
            .map(|call| ToolResult::text(&call.id, text, false))
            .collect();
        conversation.push_results(results)
    }

    /// Pushes a reply with these calls, which the service wants back as they were.
    fn push_echoed_calls(conversation: &mut Conversation, ids: &[&str]) -> AssistantMessage {
        let mut reply = tool_call_reply(ids);
        reply.message.echo = Some(Echo {
            wire: "anthropic".to_owned(),
            body: empty_arguments(),
            prefix: 0,
        });
        let ReplyAction::Calls(message) = conversation.push_reply(reply, true) else {
            panic!("no calls")
        };
        message
    }

    #[test]
    fn excess_calls_are_truncated_to_one_past_the_limit() {
        let mut conversation = Conversation::new(Vec::new(), "hi".into(), 9, 2, 0, 0);
        conversation.next_turn();
        let message = push_echoed_calls(&mut conversation, &["a", "b", "c", "d"]);
        let ids: Vec<&str> = message
            .tool_calls
            .iter()
            .map(|call| call.id.as_str())
            .collect();
        assert_eq!(ids, ["a", "b", "c"]);
        // The echo contains the calls that were dropped.
        assert!(message.echo.is_none());
    }

    #[test]
    fn call_ids_change_only_if_they_collide() {
        let mut conversation = Conversation::new(Vec::new(), "hi".into(), 9, 9, 0, 0);
        let mut all = Vec::new();
        for ids in [&["a", "a", ""][..], &["a", "b"][..]] {
            conversation.next_turn();
            let ReplyAction::Calls(message) = conversation.push_reply(tool_call_reply(ids), true)
            else {
                panic!("no calls")
            };
            all.extend(
                message
                    .tool_calls
                    .iter()
                    .map(|call| (call.id.clone(), call.provider_id.clone())),
            );
            push_same_results(&mut conversation, "x");
        }
        let own: std::collections::HashSet<_> = all.iter().map(|(id, _)| id).collect();
        assert_eq!(own.len(), all.len(), "{all:?}");
        assert_eq!(all[0], ("a".to_owned(), String::new()));
        assert_eq!(all[1].1, "a");
        assert_eq!(all[4], ("b".to_owned(), String::new()));
    }

    #[test]
    fn too_long_call_ids_are_replaced() {
        let mut conversation = Conversation::new(Vec::new(), "hi".into(), 9, 9, 0, 0);
        conversation.next_turn();
        let message = push_echoed_calls(&mut conversation, &["a", &"b".repeat(10_000)]);
        let ids = message.tool_calls.iter();
        let ids: Vec<_> = ids
            .map(|call| (call.id.as_str(), call.provider_id.as_str()))
            .collect();
        assert_eq!(ids, [("a", ""), ("call_1_1", "")]);
        assert!(message.echo.is_none());
    }

    #[test]
    fn earlier_call_ids_are_reserved_and_the_task_is_the_runs_own() {
        let earlier_reply = tool_call_reply(&["a"]).message;
        let before = Message::User {
            content: "before".into(),
        };
        let earlier = vec![before, Message::Assistant(earlier_reply)];
        let mut conversation = Conversation::new(earlier, "now".into(), 9, 9, 0, 0);
        assert_eq!(conversation.task(), "now");
        conversation.next_turn();
        let ReplyAction::Calls(message) = conversation.push_reply(tool_call_reply(&["a"]), true)
        else {
            panic!("no calls")
        };
        assert_ne!(message.tool_calls[0].id, "a");
        assert_eq!(message.tool_calls[0].provider_id, "a");
    }

    #[test]
    fn ids_and_names_of_calls_are_bounded_and_fit_a_path() {
        let mut conversation = Conversation::new(Vec::new(), "hi".into(), 9, 9, 0, 0);
        conversation.next_turn();
        let mut reply = tool_call_reply(&[".", "..", &"a".repeat(9_000), "b"]);
        reply.message.tool_calls[3].name = "é".repeat(300);
        let ReplyAction::Calls(message) = conversation.push_reply(reply, true) else {
            panic!("no calls")
        };
        let calls = message.tool_calls.iter();
        let ids: Vec<&str> = calls.map(|call| call.id.as_str()).collect();
        assert_eq!(ids, ["call_1_0", "call_1_1", "call_1_2", "b"]);
        assert_eq!(message.tool_calls[3].name, "é".repeat(128));
    }

    #[test]
    fn calls_without_tools_or_turns_left_are_not_executed() {
        let mut conversation = Conversation::new(Vec::new(), "hi".into(), 1, 9, 0, 0);
        conversation.next_turn();
        let mut reply = tool_call_reply(&["a"]);
        reply.message.echo = Some(Echo {
            wire: "anthropic".to_owned(),
            body: empty_arguments(),
            prefix: 0,
        });
        assert!(
            matches!(conversation.push_reply(reply, false), ReplyAction::Final(message) if message.tool_calls.is_empty() && message.echo.is_none())
        );
        assert!(
            matches!(conversation.push_reply(tool_call_reply(&["a"]), true), ReplyAction::OutOfTurns(message) if message.content == "hm")
        );
    }

    fn thinking_message(text: &str, prefix: u64) -> Message {
        Message::Assistant(AssistantMessage {
            content: text.to_owned(),
            tool_calls: Vec::new(),
            echo: Some(Echo {
                wire: "anthropic:model".to_owned(),
                body: empty_arguments(),
                prefix,
            }),
        })
    }

    fn has_thinking(conversation: &Conversation) -> Vec<bool> {
        let messages = conversation.messages().iter();
        let replies = messages.filter_map(|message| match message {
            Message::Assistant(reply) => Some(reply.echo.is_some()),
            _ => None,
        });
        replies.collect()
    }

    #[test]
    fn thinking_is_kept_up_to_the_first_change() {
        let thinking_after = |prefixes: &[u64]| {
            let earlier = prefixes
                .iter()
                .map(|prefix| thinking_message("hm", *prefix));
            let mut conversation = Conversation::new(earlier.collect(), "hi".into(), 9, 9, 0, 0);
            conversation.drop_foreign_thinking(|| 7);
            has_thinking(&conversation)
        };
        assert_eq!(thinking_after(&[7, 7]), [true, true]);
        assert_eq!(thinking_after(&[7, 5, 7]), [true, false, false]);
        // That run had changed its conversation; the record has the original.
        assert_eq!(thinking_after(&[7, 8, 7]), [true, false, false]);
    }

    #[test]
    fn thinking_after_the_runs_own_change_is_kept() {
        let mut conversation =
            Conversation::new(vec![thinking_message("hm", 7)], "hi".into(), 9, 9, 0, 0);
        let turn = |conversation: &mut Conversation| {
            let turn = conversation.next_turn();
            let mut reply = Reply::default();
            let Message::Assistant(message) = thinking_message("hm", 0) else {
                panic!("a reply")
            };
            reply.message = message;
            conversation.set_echo_prefix(&mut reply, || 7);
            conversation.push_followup(turn, reply.message, "more".into());
        };
        turn(&mut conversation);
        conversation.drop_thinking(1);
        turn(&mut conversation);
        conversation.drop_foreign_thinking(|| 7);
        assert_eq!(has_thinking(&conversation), [true, false, true]);
        conversation.drop_foreign_thinking(|| 8);
        assert_eq!(has_thinking(&conversation), [false, false, false]);
    }

    #[test]
    fn repeated_batches_get_a_hint_and_then_stop_the_run() {
        let mut conversation = Conversation::new(Vec::new(), "hi".into(), 50, 9, 3, 5);
        let mut push_turn = |text: &str| {
            conversation.next_turn();
            assert!(matches!(
                conversation.push_reply(tool_call_reply(&["a"]), true),
                ReplyAction::Calls(_)
            ));
            push_same_results(&mut conversation, text)
        };
        assert_eq!(push_turn("same"), LoopVerdict::Continue);
        assert_eq!(push_turn("other"), LoopVerdict::Continue);
        assert_eq!(push_turn("other"), LoopVerdict::Continue);
        assert_eq!(push_turn("other"), LoopVerdict::Warn(3));
        // The guard compares raw results: the hint does not break the repetition.
        assert_eq!(push_turn("other"), LoopVerdict::Warn(4));
        assert_eq!(push_turn("other"), LoopVerdict::Stop(5));
    }

    proptest::proptest! {
        /// A process that resumes from any part of the record reaches the same state as the process that wrote it.
        #[test]
        fn restored_replies_match_the_original_conversation(
            batches in proptest::collection::vec(
                (proptest::collection::vec(proptest::sample::select(vec!["", "a", "b", "a_2_0"]), 1..4), 0..2_u8),
                1..8,
            ),
            restored in 0..8_usize,
        ) {
            let new_conversation = || Conversation::new(Vec::new(), "hi".into(), 50, 9, 2, 4);
            let (mut first, mut next) = (new_conversation(), new_conversation());
            for (at, (ids, result)) in batches.iter().enumerate() {
                let turn = first.next_turn();
                let ReplyAction::Calls(message) = first.push_reply(tool_call_reply(ids), true) else {
                    panic!("no calls")
                };
                match at < restored {
                    true => next.restore_reply(turn, message),
                    false => {
                        assert_eq!(next.next_turn(), turn);
                        assert!(matches!(next.push_reply(tool_call_reply(ids), true), ReplyAction::Calls(_)));
                    }
                }
                let text = result.to_string();
                assert_eq!(push_same_results(&mut next, &text), push_same_results(&mut first, &text));
                assert_eq!(format!("{:?}", next.messages()), format!("{:?}", first.messages()));
            }
            let ids: Vec<_> = first
                .messages()
                .iter()
                .flat_map(|message| match message {
                    Message::Assistant(reply) => reply.tool_calls.as_slice(),
                    _ => &[],
                })
                .map(|call| &call.id)
                .collect();
            assert_eq!(ids.iter().collect::<std::collections::HashSet<_>>().len(), ids.len(), "{ids:?}");
        }
    }
}
