//! The deciding part of the loop: what has been said, what a reply means, when to give up. Pure: no I/O, no async.

use std::borrow::Cow;
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::domain::content::Content;
use crate::domain::context::Compaction;
use crate::domain::message::{AssistantMessage, Message, ToolCall, ToolResult};
use crate::domain::usage::TokenUsage;
use crate::engine::request_size;
use crate::engine::sent_messages::SentMessages;
use crate::providers::{Reply, thinking};

/// One run's conversation with its model.
#[derive(Debug)]
pub struct Conversation {
    sent: SentMessages,
    /// What the service reported of the last request: its tokens with those of its reply, and the messages they are of.
    reported: Option<(u64, usize)>,
    turn: u32,
    max_turns: u32,
    /// Calls that are kept of one reply, and one more, whose result says that there were others.
    max_calls: usize,
    call_ids: HashSet<String>,
    guard: LoopGuard,
    is_repaired: bool,
    /// How often a message was changed that the model had been sent: part of the prefix of later echoes.
    changes: u32,
}

/// What a reply means for the run.
#[derive(Debug)]
pub enum Heard {
    /// Its text is final. The message is what the record keeps.
    Final(AssistantMessage),
    /// These calls are to be performed, then [`Conversation::answer`] is due.
    Calls(AssistantMessage),
    /// It asks for tools and no turn is left to read the results.
    OutOfTurns(AssistantMessage),
}

/// What the loop guard says after a batch of results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeats {
    /// Nothing.
    Fine,
    /// The same batch came this many times in a row: a hint was added to its results.
    Hinted(u32),
    /// It came too many times: give up.
    TooMany(u32),
}

impl Conversation {
    /// Starts with the user's message, behind what was said before.
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
            if let Message::Assistant(said) = message {
                call_ids.extend(said.tool_calls.iter().map(|call| call.id.clone()));
            }
        }
        Self {
            sent: SentMessages::new(earlier, message),
            reported: None,
            turn: 0,
            max_turns,
            max_calls,
            call_ids,
            guard: LoopGuard {
                warn: loop_warn,
                stop: loop_stop,
                last: None,
                repeats: 0,
            },
            is_repaired: false,
            changes: 0,
        }
    }

    /// Drops the thinking of every reply from message `first` on. Call it when what stands before that message is no longer
    /// what the model was sent: messages were left out, shortened or summed up. Replies that follow later keep theirs.
    pub fn drop_thinking(&mut self, first: usize) {
        self.changes += 1;
        thinking::drop(self.sent.since(first));
    }

    /// Drops all thinking from the first reply on that did not follow this prefix (see [`crate::providers::echo::prefix`]):
    /// another run's with another prompt or other tools, or this run's, if a restart found other tools. `prefix` is
    /// called only if there is any thinking.
    pub fn drop_foreign_thinking(&mut self, prefix: impl FnOnce() -> u64) {
        let messages = self.messages().iter().enumerate();
        let mut echoes = messages.filter_map(|(at, message)| {
            let Message::Assistant(reply) = message else {
                return None;
            };
            Some((at, reply.echo.as_ref()?.prefix))
        });
        let Some(begins) = echoes.next() else { return };
        let prefix = prefix();
        let is_foreign = |(at, of): &(usize, u64)| {
            let changes = if *at < self.sent.own() {
                0
            } else {
                self.changes
            };
            of.wrapping_sub(prefix) > u64::from(changes)
        };
        let first = std::iter::once(begins).chain(echoes).find(is_foreign);
        if let Some((first, _)) = first {
            thinking::drop(self.sent.since(first));
        }
    }

    /// Notes in a reply's echo what stood before it. `prefix` is called only if there is an echo.
    pub fn sign(&self, reply: &mut Reply, prefix: impl FnOnce() -> u64) {
        if let Some(echo) = &mut reply.message.echo {
            echo.prefix = prefix().wrapping_add(u64::from(self.changes));
        }
    }

    /// Takes a recorded reply that asked for tools in again; its results are due.
    pub fn hear_again(&mut self, turn: u32, message: AssistantMessage) {
        self.turn = turn;
        self.call_ids
            .extend(message.tool_calls.iter().map(|call| call.id.clone()));
        self.sent.push(Message::Assistant(message));
    }

    /// Whether a final text that does not fit may be asked for again: once, and only while a turn is left.
    pub fn may_repair(&self) -> bool {
        !self.is_repaired && self.turn < self.max_turns
    }

    /// Takes a final text in that was not to be the last word, and what the model is told of it.
    pub fn say_more(&mut self, turn: u32, said: AssistantMessage, told: String) {
        self.turn = turn;
        self.is_repaired = true;
        self.sent.push(Message::Assistant(said));
        self.sent.push(Message::user(told));
    }

    /// The last turn that began.
    pub fn turn(&self) -> u32 {
        self.turn
    }

    /// The user message that the run is about, as text.
    pub fn task(&self) -> Cow<'_, str> {
        self.sent.task()
    }

    /// What to send, oldest first.
    pub fn messages(&self) -> &[Message] {
        self.sent.all()
    }

    /// The same with what it leaves out.
    pub fn sent(&self) -> &SentMessages {
        &self.sent
    }

    /// Leaves out what this says, which is what is left out already and more.
    pub fn compact(&mut self, compaction: Compaction) {
        let changed = self.sent.apply(compaction);
        self.drop_thinking(changed);
        // What was reported is of another request.
        self.reported = None;
    }

    /// Takes in what the service reported of the last reply that is there.
    pub fn report(&mut self, tokens: &TokenUsage) {
        let is_reply = |message: &Message| matches!(message, Message::Assistant(_));
        let last = self.messages().iter().rposition(is_reply);
        self.reported = last.and_then(|at| match &self.messages()[at] {
            Message::Assistant(reply) => Some((kept(tokens, reply), at + 1)),
            _ => None,
        });
    }

    /// The tokens of the next request, which begins with so many bytes of system prompt and tools: an estimate, or what
    /// was reported of the last one and its reply with an estimate of what is new, whichever is more.
    pub fn size(&self, preamble: usize) -> u64 {
        let messages = self.messages();
        let estimate = request_size::tokens(preamble + request_size::messages(messages));
        let reported = self.reported.map_or(0, |(tokens, of)| {
            let new = messages.get(of..).unwrap_or_default();
            tokens.saturating_add(request_size::tokens(request_size::messages(new)))
        });
        estimate.max(reported)
    }

    /// How many results the next request brings to the model.
    pub fn results_pending(&self) -> usize {
        match self.messages().last() {
            Some(Message::Tool { tool_results }) => tool_results.len(),
            _ => 0,
        }
    }

    /// Begins the next turn and returns its number, from 1.
    pub fn next_turn(&mut self) -> u32 {
        self.turn += 1;
        self.turn
    }

    /// Takes a reply in. `offered` says whether the request offered any tool: without one, calls mean nothing.
    pub fn hear(&mut self, reply: Reply, offered: bool) -> Heard {
        let mut message = reply.message;
        // The reply is the next message, whoever adds it.
        let of = self.messages().len() + 1;
        let usage = reply.usage;
        self.reported = usage.map(|tokens| (kept(&tokens, &message), of));
        if !offered || message.tool_calls.is_empty() {
            if !message.tool_calls.is_empty() {
                // The provider's own form still has the calls, which nobody will answer.
                message.echo = None;
                message.tool_calls.clear();
            }
            return Heard::Final(message);
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
            self.make_unique(call, position);
        }
        if self.turn >= self.max_turns {
            return Heard::OutOfTurns(message);
        }
        self.sent.push(Message::Assistant(message.clone()));
        Heard::Calls(message)
    }

    /// Takes the results of the last calls in, in the calls' order, and adds a hint where the run goes in circles.
    pub fn answer(&mut self, mut results: Vec<ToolResult>) -> Repeats {
        let calls = match self.sent.all().last() {
            Some(Message::Assistant(said)) => said.tool_calls.as_slice(),
            _ => &[],
        };
        let verdict = self.guard.compare(calls, &results);
        if let Repeats::Hinted(times) = verdict {
            // The record keeps the results without the hint.
            self.changes += 1;
            for result in &mut results {
                result.content.push_str(&format!(
                    "\n\n[This call with these arguments has given this result {times} times in a row. \
                     Try something else, or give your final answer.]"
                ));
            }
        }
        let mut answered = Message::Tool {
            tool_results: results,
        };
        answered.drop_data();
        self.sent.push(answered);
        verdict
    }

    fn make_unique(&mut self, call: &mut ToolCall, position: usize) {
        let given = std::mem::take(&mut call.id);
        let mut id = if given.is_empty() {
            format!("call_{}_{position}", self.turn)
        } else {
            given.clone()
        };
        let mut tries = 0;
        while !self.call_ids.insert(id.clone()) {
            tries += 1;
            id = match tries {
                1 => format!("{given}_{}_{position}", self.turn),
                _ => format!("{given}_{}_{position}_{tries}", self.turn),
            };
        }
        if id != given {
            call.provider_id = given;
        }
        call.id = id;
    }
}

/// The tokens of a request and its reply that are part of the next request: thoughts only if they are sent back.
fn kept(tokens: &TokenUsage, reply: &AssistantMessage) -> u64 {
    let forgotten = match reply.echo {
        Some(_) => 0,
        None => tokens.reasoning,
    };
    tokens.total().saturating_sub(forgotten)
}

/// Compares whole batches (names, arguments, raw results) of successive turns.
#[derive(Debug)]
struct LoopGuard {
    warn: u32,
    stop: u32,
    last: Option<u64>,
    repeats: u32,
}

impl LoopGuard {
    fn compare(&mut self, calls: &[ToolCall], results: &[ToolResult]) -> Repeats {
        let mut hasher = DefaultHasher::new();
        for call in calls {
            (&call.name, call.arguments.get()).hash(&mut hasher);
        }
        for result in results {
            (&result.content, result.is_error).hash(&mut hasher);
            let attached = result.attachments.iter();
            attached.for_each(|attachment| attachment.sha256.hash(&mut hasher));
        }
        let batch = Some(hasher.finish());
        self.repeats = if self.last == batch {
            self.repeats + 1
        } else {
            1
        };
        self.last = batch;
        match self.repeats {
            times if self.stop > 0 && times >= self.stop => Repeats::TooMany(times),
            times if self.warn > 0 && times >= self.warn => Repeats::Hinted(times),
            _ => Repeats::Fine,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Conversation, Heard, Repeats};
    use crate::domain::message::{
        AssistantMessage, Echo, Message, ToolCall, ToolResult, no_arguments,
    };
    use crate::providers::Reply;

    fn asks(ids: &[&str]) -> Reply {
        let call = |id: &&str| ToolCall {
            id: (*id).to_owned(),
            provider_id: String::new(),
            name: "call_agent".to_owned(),
            arguments: no_arguments(),
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

    fn answer_all(talk: &mut Conversation, text: &str) -> Repeats {
        let Some(Message::Assistant(said)) = talk.messages().last() else {
            panic!("nothing was asked")
        };
        let results = said.tool_calls.iter();
        let results = results
            .map(|call| ToolResult::text(&call.id, text, false))
            .collect();
        talk.answer(results)
    }

    #[test]
    fn of_too_many_calls_one_is_kept_past_the_bound_to_say_so() {
        let mut talk = Conversation::new(Vec::new(), "hi".into(), 9, 2, 0, 0);
        talk.next_turn();
        let mut said = asks(&["a", "b", "c", "d"]);
        said.message.echo = Some(Echo {
            wire: "anthropic".to_owned(),
            body: no_arguments(),
            prefix: 0,
        });
        let Heard::Calls(said) = talk.hear(said, true) else {
            panic!("no calls")
        };
        let ids: Vec<&str> = said
            .tool_calls
            .iter()
            .map(|call| call.id.as_str())
            .collect();
        assert_eq!(ids, ["a", "b", "c"]);
        // The provider's own form has calls in it that nobody answers.
        assert!(said.echo.is_none());
    }

    #[test]
    fn ids_are_changed_only_where_they_collide() {
        let mut talk = Conversation::new(Vec::new(), "hi".into(), 9, 9, 0, 0);
        let mut all = Vec::new();
        for ids in [&["a", "a", ""][..], &["a", "b"][..]] {
            talk.next_turn();
            let Heard::Calls(said) = talk.hear(asks(ids), true) else {
                panic!("no calls")
            };
            all.extend(
                said.tool_calls
                    .iter()
                    .map(|call| (call.id.clone(), call.provider_id.clone())),
            );
            answer_all(&mut talk, "x");
        }
        let own: std::collections::HashSet<_> = all.iter().map(|(id, _)| id).collect();
        assert_eq!(own.len(), all.len(), "{all:?}");
        assert_eq!(all[0], ("a".to_owned(), String::new()));
        assert_eq!(all[1].1, "a");
        assert_eq!(all[4], ("b".to_owned(), String::new()));
    }

    #[test]
    fn what_was_said_before_keeps_its_ids_and_the_task_is_the_runs_own() {
        let said = asks(&["a"]).message;
        let before = Message::User {
            content: "before".into(),
        };
        let earlier = vec![before, Message::Assistant(said)];
        let mut talk = Conversation::new(earlier, "now".into(), 9, 9, 0, 0);
        assert_eq!(talk.task(), "now");
        talk.next_turn();
        let Heard::Calls(said) = talk.hear(asks(&["a"]), true) else {
            panic!("no calls")
        };
        assert_ne!(said.tool_calls[0].id, "a");
        assert_eq!(said.tool_calls[0].provider_id, "a");
    }

    #[test]
    fn calls_nobody_offered_are_ignored_and_the_last_turns_are_not_performed() {
        let mut talk = Conversation::new(Vec::new(), "hi".into(), 1, 9, 0, 0);
        talk.next_turn();
        let mut echoed = asks(&["a"]);
        echoed.message.echo = Some(Echo {
            wire: "anthropic".to_owned(),
            body: no_arguments(),
            prefix: 0,
        });
        assert!(
            matches!(talk.hear(echoed, false), Heard::Final(said) if said.tool_calls.is_empty() && said.echo.is_none())
        );
        assert!(
            matches!(talk.hear(asks(&["a"]), true), Heard::OutOfTurns(said) if said.content == "hm")
        );
    }

    fn thinks(text: &str, prefix: u64) -> Message {
        Message::Assistant(AssistantMessage {
            content: text.to_owned(),
            tool_calls: Vec::new(),
            echo: Some(Echo {
                wire: "anthropic:model".to_owned(),
                body: no_arguments(),
                prefix,
            }),
        })
    }

    fn thinking(talk: &Conversation) -> Vec<bool> {
        let messages = talk.messages().iter();
        let replies = messages.filter_map(|message| match message {
            Message::Assistant(reply) => Some(reply.echo.is_some()),
            _ => None,
        });
        replies.collect()
    }

    #[test]
    fn thinking_is_kept_up_to_the_first_change() {
        let of = |prefixes: &[u64]| {
            let earlier = prefixes.iter().map(|prefix| thinks("hm", *prefix));
            let mut talk = Conversation::new(earlier.collect(), "hi".into(), 9, 9, 0, 0);
            talk.drop_foreign_thinking(|| 7);
            thinking(&talk)
        };
        assert_eq!(of(&[7, 7]), [true, true]);
        assert_eq!(of(&[7, 5, 7]), [true, false, false]);
        // That run had changed its conversation, which is recorded as it was.
        assert_eq!(of(&[7, 8, 7]), [true, false, false]);
    }

    #[test]
    fn thinking_after_a_change_of_ones_own_is_kept() {
        let mut talk = Conversation::new(vec![thinks("hm", 7)], "hi".into(), 9, 9, 0, 0);
        let turn = |talk: &mut Conversation| {
            let turn = talk.next_turn();
            let mut reply = Reply::default();
            let Message::Assistant(message) = thinks("hm", 0) else {
                panic!("a reply")
            };
            reply.message = message;
            talk.sign(&mut reply, || 7);
            talk.say_more(turn, reply.message, "more".into());
        };
        turn(&mut talk);
        talk.drop_thinking(1);
        turn(&mut talk);
        talk.drop_foreign_thinking(|| 7);
        assert_eq!(thinking(&talk), [true, false, true]);
        talk.drop_foreign_thinking(|| 8);
        assert_eq!(thinking(&talk), [false, false, false]);
    }

    #[test]
    fn going_in_circles_is_hinted_at_and_then_ended() {
        let mut talk = Conversation::new(Vec::new(), "hi".into(), 50, 9, 3, 5);
        let mut say = |text: &str| {
            talk.next_turn();
            assert!(matches!(talk.hear(asks(&["a"]), true), Heard::Calls(_)));
            answer_all(&mut talk, text)
        };
        assert_eq!(say("same"), Repeats::Fine);
        assert_eq!(say("other"), Repeats::Fine);
        assert_eq!(say("other"), Repeats::Fine);
        assert_eq!(say("other"), Repeats::Hinted(3));
        // The comparison is of raw results: the hint itself does not break the circle.
        assert_eq!(say("other"), Repeats::Hinted(4));
        assert_eq!(say("other"), Repeats::TooMany(5));
    }

    proptest::proptest! {
        /// Another process that takes up a part of the record stands where this one stood, and goes on alike.
        #[test]
        fn what_is_heard_again_is_what_was_heard(
            batches in proptest::collection::vec(
                (proptest::collection::vec(proptest::sample::select(vec!["", "a", "b", "a_2_0"]), 1..4), 0..2_u8),
                1..8,
            ),
            taken_up in 0..8_usize,
        ) {
            let talk = || Conversation::new(Vec::new(), "hi".into(), 50, 9, 2, 4);
            let (mut first, mut next) = (talk(), talk());
            for (at, (ids, result)) in batches.iter().enumerate() {
                let turn = first.next_turn();
                let Heard::Calls(said) = first.hear(asks(ids), true) else {
                    panic!("no calls")
                };
                match at < taken_up {
                    true => next.hear_again(turn, said),
                    false => {
                        assert_eq!(next.next_turn(), turn);
                        assert!(matches!(next.hear(asks(ids), true), Heard::Calls(_)));
                    }
                }
                let text = result.to_string();
                assert_eq!(answer_all(&mut next, &text), answer_all(&mut first, &text));
                assert_eq!(format!("{:?}", next.messages()), format!("{:?}", first.messages()));
            }
            let ids: Vec<_> = first
                .messages()
                .iter()
                .flat_map(|message| match message {
                    Message::Assistant(said) => said.tool_calls.as_slice(),
                    _ => &[],
                })
                .map(|call| &call.id)
                .collect();
            assert_eq!(ids.iter().collect::<std::collections::HashSet<_>>().len(), ids.len(), "{ids:?}");
        }
    }
}
