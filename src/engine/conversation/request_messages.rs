//! The messages of a conversation as requests send them: all recorded ones, or a summary of the oldest and the rest.
//! Pure.

use std::borrow::Cow;

use crate::domain::content::Content;
use crate::domain::context::Compaction;
use crate::domain::message::{Message, ToolCall, ToolResult};
use crate::engine::conversation::request_size::{self, SentAttachments};

#[derive(Debug)]
pub struct RequestMessages {
    messages: Vec<Message>,
    /// The index of the run's own user message.
    prompt_index: usize,
    /// The index of the first message that the summary does not replace.
    tail_index: usize,
    compaction: Compaction,
}

impl RequestMessages {
    /// Starts with the run's own user message, after the messages of earlier runs.
    pub fn new(earlier: Vec<Message>, message: Content) -> Self {
        let prompt_index = earlier.len();
        let mut messages = earlier;
        messages.push(Message::User { content: message });
        messages.iter_mut().for_each(Message::drop_data);
        Self {
            messages,
            prompt_index,
            tail_index: 0,
            compaction: Compaction::default(),
        }
    }

    pub fn as_slice(&self) -> &[Message] {
        &self.messages
    }

    pub fn from_index_mut(&mut self, first: usize) -> &mut [Message] {
        let first = first.min(self.messages.len());
        &mut self.messages[first..]
    }

    /// The index of the run's own user message.
    pub fn prompt_index(&self) -> usize {
        self.prompt_index
    }

    pub fn push(&mut self, message: Message) {
        self.messages.push(message);
    }

    /// The run's own user message, as text.
    pub fn task(&self) -> Cow<'_, str> {
        match self.messages.get(self.prompt_index) {
            Some(Message::User { content }) => content.to_plain_text(),
            _ => Cow::Borrowed(""),
        }
    }

    /// What the requests leave out.
    pub fn compaction(&self) -> &Compaction {
        &self.compaction
    }

    /// Applies a compaction, which must include all that the current one leaves out. Returns the index of the first
    /// message that may have changed.
    pub fn apply(&mut self, compaction: Compaction) -> usize {
        let is_new_summary = compaction.before > self.compaction.before;
        if is_new_summary {
            self.replace_oldest(&compaction);
        }
        let from = self.compaction.results_before.max(compaction.before);
        self.compaction = compaction;
        let end = self.index_of(self.compaction.results_before);
        for index in self.index_of(from)..end.min(self.messages.len()) {
            self.drop_results_at(index);
        }
        if is_new_summary {
            0
        } else {
            self.index_of(from)
        }
    }

    fn replace_oldest(&mut self, compaction: &Compaction) {
        let cut = self.index_of(compaction.before).min(self.messages.len());
        let task = compaction.task.filter(|task| *task < compaction.before);
        let task = task.map(|task| match self.compaction.task == Some(task) {
            true => 0,
            false => self.index_of(task).min(cut),
        });
        let summary = Message::user(format!(
            "[The older messages of this conversation were replaced by this summary of them.]\n\n{}",
            compaction.summary
        ));
        let mut messages = Vec::with_capacity(self.messages.len() - cut + 2);
        messages.extend(task.and_then(|index| self.messages.get(index).cloned()));
        messages.push(summary);
        let tail = messages.len();
        messages.extend(self.messages.drain(cut..));
        self.prompt_index = match self.prompt_index < cut {
            true => 0,
            false => self.prompt_index - cut + tail,
        };
        self.messages = messages;
        self.tail_index = tail;
    }

    fn drop_results_at(&mut self, index: usize) {
        let (before, rest) = self.messages.split_at_mut(index);
        if let Some(Message::Tool { tool_results }) = rest.first_mut() {
            for result in tool_results {
                if let Some(notice) = drop_notice(before.last(), result) {
                    result.content = notice;
                    result.attachments = Vec::new();
                }
            }
        }
    }

    /// Chooses the oldest messages to summarize: as few as possible so that the others have at most `max_bytes` bytes,
    /// else all but the last turn. Returns the compaction without its summary, and those messages; `None` if there are
    /// none.
    pub fn plan_summary(
        &self,
        max_bytes: usize,
        sent: SentAttachments,
    ) -> Option<(Compaction, &[Message])> {
        let is_reply = |message: &Message| matches!(message, Message::Assistant(_));
        let last = self.messages.iter().rposition(is_reply);
        let last = last.map_or(self.prompt_index, |reply| reply.max(self.prompt_index));
        let prompt_bytes = request_size::message_bytes(self.messages.get(self.prompt_index)?, sent);
        let tail = self.messages.get(self.tail_index..)?;
        let mut kept_bytes = request_size::messages_bytes(tail, sent);
        let mut last_cut = None;
        for index in self.tail_index + 1..=last {
            kept_bytes -= request_size::message_bytes(&self.messages[index - 1], sent);
            let is_prompt_alone =
                self.prompt_index == self.tail_index && index == self.tail_index + 1;
            if matches!(self.messages[index], Message::Tool { .. }) || is_prompt_alone {
                continue;
            }
            last_cut = Some(index);
            let task_bytes = if self.prompt_index < index {
                prompt_bytes
            } else {
                0
            };
            if kept_bytes + task_bytes <= max_bytes {
                break;
            }
        }
        let cut = last_cut?;
        let compaction = Compaction {
            before: self.recorded_index(cut),
            task: (self.prompt_index < cut).then(|| self.recorded_index(self.prompt_index)),
            summary: String::new(),
            results_before: self.compaction.results_before,
        };
        Some((compaction, &self.messages[self.tail_index..cut]))
    }

    /// Chooses the oldest tool results to drop: so many that the messages become `excess` bytes smaller, else all but
    /// those of the last turn. Returns the compaction and the number of results; `None` if there are none.
    pub fn plan_result_drop(
        &self,
        excess: usize,
        sent: SentAttachments,
    ) -> Option<(Compaction, usize)> {
        let is_results = |message: &Message| matches!(message, Message::Tool { .. });
        let last = self.messages.iter().rposition(is_results)?;
        let from = self
            .index_of(self.compaction.results_before)
            .max(self.tail_index);
        let (mut saved, mut dropped, mut end) = (0, 0, None);
        for index in from..last {
            let Message::Tool { tool_results } = &self.messages[index] else {
                continue;
            };
            let before = self.messages[..index].last();
            for result in tool_results {
                if let Some(notice) = drop_notice(before, result) {
                    let bytes = request_size::result_bytes(result, sent);
                    saved += bytes.saturating_sub(notice.len());
                    dropped += 1;
                    end = Some(index + 1);
                }
            }
            if saved >= excess {
                break;
            }
        }
        let compaction = Compaction {
            results_before: self.recorded_index(end?),
            ..self.compaction.clone()
        };
        Some((compaction, dropped))
    }

    /// How many replies of the run itself there are from this recorded message on.
    pub fn replies_since(&self, recorded_index: usize) -> usize {
        let from = self.index_of(recorded_index).max(self.prompt_index);
        let messages = self.messages.get(from..).unwrap_or_default();
        let is_reply = |message: &&Message| matches!(message, Message::Assistant(_));
        messages.iter().filter(is_reply).count()
    }

    /// The position in the record of the message at this index.
    fn recorded_index(&self, index: usize) -> usize {
        match index < self.tail_index {
            true => self.compaction.task.unwrap_or_default(),
            false => index - self.tail_index + self.compaction.before,
        }
    }

    /// The index of a recorded message that the summary does not replace.
    fn index_of(&self, recorded_index: usize) -> usize {
        recorded_index.saturating_sub(self.compaction.before) + self.tail_index
    }
}

/// The notice that replaces a dropped result, if it is shorter than the result. Attachments count whether they are sent or
/// not: what a recorded compaction drops does not depend on the model.
fn drop_notice(reply: Option<&Message>, result: &ToolResult) -> Option<String> {
    let calls = match reply {
        Some(Message::Assistant(reply)) => reply.tool_calls.as_slice(),
        _ => &[],
    };
    let is_called = |call: &&ToolCall| call.id == result.call_id;
    let tool = calls.iter().find(is_called);
    let tool = tool.map_or("a tool", |call| &call.name);
    let notice = format!(
        "[This result of {tool} ({} bytes) was dropped to keep the conversation short.]",
        result.content.len()
    );
    let bytes = request_size::result_bytes(result, SentAttachments::ALL);
    (notice.len() < bytes).then_some(notice)
}

#[cfg(test)]
mod tests {
    use super::RequestMessages;
    use crate::domain::context::Compaction;
    use crate::domain::message::{
        AssistantMessage, Message, ToolCall, ToolResult, empty_arguments,
    };
    use crate::engine::conversation::request_size::SentAttachments;

    fn user(text: &str) -> Message {
        Message::user(text)
    }

    fn turn(id: &str, bytes: usize) -> [Message; 2] {
        let call = ToolCall {
            id: id.to_owned(),
            provider_id: String::new(),
            name: "read".to_owned(),
            arguments: empty_arguments(),
            invalid_arguments: None,
        };
        let reply = AssistantMessage {
            content: String::new(),
            tool_calls: vec![call],
            echo: None,
        };
        let result = ToolResult::text(id, id.repeat(bytes), false);
        let results = Message::Tool {
            tool_results: vec![result],
        };
        [Message::Assistant(reply), results]
    }

    fn with_turns(turns: &[&str]) -> RequestMessages {
        let mut messages = RequestMessages::new(Vec::new(), "task".into());
        for id in turns {
            turn(id, 400).into_iter().for_each(|it| messages.push(it));
        }
        messages
    }

    /// The messages in short: a text, the ids of a reply's calls, or the first character of a result, `-` if it was
    /// dropped.
    fn short(messages: &[Message]) -> String {
        let one = |message: &Message| match message {
            Message::User { content } => match content.to_plain_text().strip_prefix("[The") {
                Some(summary) => format!("[{}]", summary.rsplit('\n').next().unwrap_or_default()),
                None => content.to_plain_text().into_owned(),
            },
            Message::Assistant(reply) => {
                let ids = reply.tool_calls.iter().map(|call| call.id.clone());
                ids.collect()
            }
            Message::Tool { tool_results } => {
                let text = &tool_results[0].content;
                let is_dropped = text.starts_with("[This result of read (400 bytes)");
                if is_dropped { "-" } else { &text[..1] }.to_owned()
            }
        };
        messages.iter().map(one).collect::<Vec<_>>().join(" ")
    }

    fn compact(messages: &mut RequestMessages, max_bytes: usize, summary: &str) -> Option<String> {
        let (compaction, oldest) = messages.plan_summary(max_bytes, SentAttachments::ALL)?;
        let oldest = short(oldest);
        let summary = summary.to_owned();
        messages.apply(Compaction {
            summary,
            ..compaction
        });
        Some(oldest)
    }

    #[test]
    fn the_oldest_turns_are_summarized_repeatedly() {
        let mut messages = with_turns(&["a", "b", "c", "d"]);
        assert_eq!(
            compact(&mut messages, 1200, "1").as_deref(),
            Some("task a a b b")
        );
        assert_eq!(short(messages.as_slice()), "task [1] c c d d");
        assert_eq!((&*messages.task(), messages.replies_since(5)), ("task", 2));
        turn("e", 400).into_iter().for_each(|it| messages.push(it));
        assert_eq!(compact(&mut messages, 0, "2").as_deref(), Some("c c d d"));
        assert_eq!(short(messages.as_slice()), "task [2] e e");
        assert_eq!(compact(&mut messages, 0, "3"), None, "the last turn stays");
        assert_eq!(
            messages.compaction(),
            &Compaction {
                before: 9,
                task: Some(0),
                summary: "2".to_owned(),
                results_before: 0,
            }
        );
    }

    #[test]
    fn a_run_of_one_turn_has_nothing_to_summarize() {
        let all = SentAttachments::ALL;
        assert!(with_turns(&[]).plan_summary(0, all).is_none());
        assert!(with_turns(&["a"]).plan_summary(0, all).is_none());
        assert!(with_turns(&["a"]).plan_result_drop(1000, all).is_none());
    }

    #[test]
    fn messages_of_earlier_runs_are_summarized_first() {
        let earlier = |text: &str| {
            let reply = AssistantMessage {
                content: text.to_owned(),
                ..AssistantMessage::default()
            };
            [user(text), Message::Assistant(reply)]
        };
        let earlier = [earlier("1"), earlier("2")].concat();
        let mut messages = RequestMessages::new(earlier, "now".into());
        compact(&mut messages, 0, "s").expect("a summary");
        assert_eq!(short(messages.as_slice()), "[s] now");
        assert_eq!(messages.compaction().task, None);
        turn("a", 1).into_iter().for_each(|it| messages.push(it));
        turn("b", 1).into_iter().for_each(|it| messages.push(it));
        compact(&mut messages, 0, "t").expect("a summary");
        assert_eq!(short(messages.as_slice()), "now [t] b b");
        assert_eq!(
            (messages.compaction().task, &*messages.task()),
            (Some(4), "now")
        );
    }

    #[test]
    fn the_oldest_results_are_dropped_but_not_the_last() {
        let mut messages = with_turns(&["a", "b", "c"]);
        let plan = |messages: &RequestMessages, excess| {
            messages.plan_result_drop(excess, SentAttachments::ALL)
        };
        let (compaction, dropped) = plan(&messages, 10).expect("results");
        assert_eq!((compaction.results_before, dropped), (3, 1));
        messages.apply(compaction);
        assert_eq!(short(messages.as_slice()), "task a - b b c c");
        let (compaction, dropped) = plan(&messages, 100_000).expect("results");
        assert_eq!(dropped, 1);
        messages.apply(compaction);
        assert_eq!(short(messages.as_slice()), "task a - b - c c");
        assert!(plan(&messages, 1).is_none());
    }

    #[test]
    fn dropping_in_steps_equals_dropping_at_once() {
        let mut messages = with_turns(&["a", "b", "c", "d"]);
        let (compaction, _) = messages
            .plan_result_drop(600, SentAttachments::ALL)
            .expect("results");
        messages.apply(compaction);
        compact(&mut messages, 1500, "1").expect("a summary");
        assert_eq!(short(messages.as_slice()), "task [1] b - c c d d");
        let mut reapplied = with_turns(&["a", "b", "c", "d"]);
        reapplied.apply(messages.compaction().clone());
        assert_eq!(
            format!("{:?}", reapplied.as_slice()),
            format!("{:?}", messages.as_slice())
        );
    }
}
