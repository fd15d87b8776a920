//! A conversation as requests send it: everything that is recorded, or a summary of its oldest part with the rest. Pure.

use std::borrow::Cow;

use crate::domain::content::Content;
use crate::domain::context::Compaction;
use crate::domain::message::{Message, ToolCall, ToolResult};
use crate::engine::request_size;

/// The messages of a run's next request.
#[derive(Debug)]
pub struct SentMessages {
    messages: Vec<Message>,
    /// The index of the run's own message.
    own: usize,
    /// The index of the first message that the summary does not stand for.
    tail: usize,
    compaction: Compaction,
}

impl SentMessages {
    /// The run's own message behind what came before the run.
    pub fn new(earlier: Vec<Message>, message: Content) -> Self {
        let own = earlier.len();
        let mut messages = earlier;
        messages.push(Message::User { content: message });
        messages.iter_mut().for_each(Message::drop_data);
        Self {
            messages,
            own,
            tail: 0,
            compaction: Compaction::default(),
        }
    }

    /// All of them, oldest first.
    pub fn all(&self) -> &[Message] {
        &self.messages
    }

    /// Those from this index on.
    pub fn since(&mut self, first: usize) -> &mut [Message] {
        let first = first.min(self.messages.len());
        &mut self.messages[first..]
    }

    /// The index of the run's own message.
    pub fn own(&self) -> usize {
        self.own
    }

    /// Adds a message.
    pub fn push(&mut self, message: Message) {
        self.messages.push(message);
    }

    /// The run's own message, as text.
    pub fn task(&self) -> Cow<'_, str> {
        match self.messages.get(self.own) {
            Some(Message::User { content }) => content.plain(),
            _ => Cow::Borrowed(""),
        }
    }

    /// What is left out.
    pub fn compaction(&self) -> &Compaction {
        &self.compaction
    }

    /// Leaves out what this says, which is what is left out already and more. Returns the index of the first message
    /// that may have changed.
    pub fn apply(&mut self, compaction: Compaction) -> usize {
        let is_summed_up = compaction.before > self.compaction.before;
        if is_summed_up {
            self.replace_oldest(&compaction);
        }
        let from = self.compaction.results_before.max(compaction.before);
        self.compaction = compaction;
        let end = self.index(self.compaction.results_before);
        for at in self.index(from)..end.min(self.messages.len()) {
            self.drop_results_of(at);
        }
        if is_summed_up { 0 } else { self.index(from) }
    }

    fn replace_oldest(&mut self, compaction: &Compaction) {
        let cut = self.index(compaction.before).min(self.messages.len());
        let task = compaction.task.filter(|task| *task < compaction.before);
        let task = task.map(|task| match self.compaction.task == Some(task) {
            true => 0,
            false => self.index(task).min(cut),
        });
        let summary = Message::user(format!(
            "[The older messages of this conversation were replaced by this summary of them.]\n\n{}",
            compaction.summary
        ));
        let mut messages = Vec::with_capacity(self.messages.len() - cut + 2);
        messages.extend(task.and_then(|at| self.messages.get(at).cloned()));
        messages.push(summary);
        let tail = messages.len();
        messages.extend(self.messages.drain(cut..));
        self.own = match self.own < cut {
            true => 0,
            false => self.own - cut + tail,
        };
        self.messages = messages;
        self.tail = tail;
    }

    fn drop_results_of(&mut self, at: usize) {
        let (before, rest) = self.messages.split_at_mut(at);
        if let Some(Message::Tool { tool_results }) = rest.first_mut() {
            for result in tool_results {
                if let Some(notice) = shorter(before.last(), result) {
                    result.content = notice;
                    result.attachments = Vec::new();
                }
            }
        }
    }

    /// What is left out once the oldest messages are summed up, and those messages: so few of them that the others have
    /// at most `room` bytes, else all but the last turn. `None` if there are none.
    pub fn oldest(&self, room: usize) -> Option<(Compaction, &[Message])> {
        let is_reply = |message: &Message| matches!(message, Message::Assistant(_));
        let last = self.messages.iter().rposition(is_reply);
        let last = last.map_or(self.own, |reply| reply.max(self.own));
        let own = request_size::message(self.messages.get(self.own)?);
        let mut kept = request_size::messages(self.messages.get(self.tail..)?);
        let mut found = None;
        for at in self.tail + 1..=last {
            kept -= request_size::message(&self.messages[at - 1]);
            let is_own_alone = self.own == self.tail && at == self.tail + 1;
            if matches!(self.messages[at], Message::Tool { .. }) || is_own_alone {
                continue;
            }
            found = Some(at);
            let task = if self.own < at { own } else { 0 };
            if kept + task <= room {
                break;
            }
        }
        let cut = found?;
        let compaction = Compaction {
            before: self.recorded(cut),
            task: (self.own < cut).then(|| self.recorded(self.own)),
            summary: String::new(),
            results_before: self.compaction.results_before,
        };
        Some((compaction, &self.messages[self.tail..cut]))
    }

    /// What is left out once the oldest tool results are dropped that make the messages `excess` bytes smaller, else all
    /// but those of the last turn; and how many those are. `None` if there are none.
    pub fn oldest_results(&self, excess: usize) -> Option<(Compaction, usize)> {
        let is_results = |message: &Message| matches!(message, Message::Tool { .. });
        let last = self.messages.iter().rposition(is_results)?;
        let from = self.index(self.compaction.results_before).max(self.tail);
        let (mut saved, mut dropped, mut end) = (0, 0, None);
        for at in from..last {
            let Message::Tool { tool_results } = &self.messages[at] else {
                continue;
            };
            let before = self.messages[..at].last();
            for result in tool_results {
                if let Some(notice) = shorter(before, result) {
                    saved += request_size::result(result) - notice.len();
                    dropped += 1;
                    end = Some(at + 1);
                }
            }
            if saved >= excess {
                break;
            }
        }
        let compaction = Compaction {
            results_before: self.recorded(end?),
            ..self.compaction.clone()
        };
        Some((compaction, dropped))
    }

    /// How many replies of the run itself are among the last messages of all that begin with this recorded one.
    pub fn replies_since(&self, recorded: usize) -> usize {
        let from = self.index(recorded).max(self.own);
        let messages = self.messages.get(from..).unwrap_or_default();
        let is_reply = |message: &&Message| matches!(message, Message::Assistant(_));
        messages.iter().filter(is_reply).count()
    }

    /// The recorded number of the message at this index.
    fn recorded(&self, at: usize) -> usize {
        match at < self.tail {
            true => self.compaction.task.unwrap_or_default(),
            false => at - self.tail + self.compaction.before,
        }
    }

    /// The index of a recorded message that is not left out.
    fn index(&self, recorded: usize) -> usize {
        recorded.saturating_sub(self.compaction.before) + self.tail
    }
}

/// What stands for a result of the reply before it, if that is shorter.
fn shorter(reply: Option<&Message>, result: &ToolResult) -> Option<String> {
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
    (notice.len() < request_size::result(result)).then_some(notice)
}

#[cfg(test)]
mod tests {
    use super::SentMessages;
    use crate::domain::context::Compaction;
    use crate::domain::message::{AssistantMessage, Message, ToolCall, ToolResult, no_arguments};

    fn user(text: &str) -> Message {
        Message::user(text)
    }

    fn turn(id: &str, bytes: usize) -> [Message; 2] {
        let call = ToolCall {
            id: id.to_owned(),
            provider_id: String::new(),
            name: "read".to_owned(),
            arguments: no_arguments(),
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

    fn of(turns: &[&str]) -> SentMessages {
        let mut sent = SentMessages::new(Vec::new(), "task".into());
        for id in turns {
            turn(id, 400).into_iter().for_each(|it| sent.push(it));
        }
        sent
    }

    /// The messages in short: the first letter of a text, a call's id, or a result's first character, `-` if dropped.
    fn short(messages: &[Message]) -> String {
        let one = |message: &Message| match message {
            Message::User { content } => match content.plain().strip_prefix("[The") {
                Some(summary) => format!("[{}]", summary.rsplit('\n').next().unwrap_or_default()),
                None => content.plain().into_owned(),
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

    fn compact(sent: &mut SentMessages, room: usize, summary: &str) -> Option<String> {
        let (compaction, oldest) = sent.oldest(room)?;
        let oldest = short(oldest);
        let summary = summary.to_owned();
        sent.apply(Compaction {
            summary,
            ..compaction
        });
        Some(oldest)
    }

    #[test]
    fn the_oldest_turns_become_a_summary_again_and_again() {
        let mut sent = of(&["a", "b", "c", "d"]);
        assert_eq!(
            compact(&mut sent, 1200, "1").as_deref(),
            Some("task a a b b")
        );
        assert_eq!(short(sent.all()), "task [1] c c d d");
        assert_eq!((&*sent.task(), sent.replies_since(5)), ("task", 2));
        turn("e", 400).into_iter().for_each(|it| sent.push(it));
        assert_eq!(compact(&mut sent, 0, "2").as_deref(), Some("c c d d"));
        assert_eq!(short(sent.all()), "task [2] e e");
        assert_eq!(compact(&mut sent, 0, "3"), None, "the last turn stays");
        assert_eq!(
            sent.compaction(),
            &Compaction {
                before: 9,
                task: Some(0),
                summary: "2".to_owned(),
                results_before: 0,
            }
        );
    }

    #[test]
    fn a_run_of_one_turn_has_nothing_to_sum_up() {
        assert!(of(&[]).oldest(0).is_none());
        assert!(of(&["a"]).oldest(0).is_none());
        assert!(of(&["a"]).oldest_results(1000).is_none());
    }

    #[test]
    fn what_came_before_a_run_goes_first() {
        let earlier = |text: &str| {
            let reply = AssistantMessage {
                content: text.to_owned(),
                ..AssistantMessage::default()
            };
            [user(text), Message::Assistant(reply)]
        };
        let earlier = [earlier("1"), earlier("2")].concat();
        let mut sent = SentMessages::new(earlier, "now".into());
        compact(&mut sent, 0, "s").expect("a summary");
        assert_eq!(short(sent.all()), "[s] now");
        assert_eq!(sent.compaction().task, None);
        turn("a", 1).into_iter().for_each(|it| sent.push(it));
        turn("b", 1).into_iter().for_each(|it| sent.push(it));
        compact(&mut sent, 0, "t").expect("a summary");
        assert_eq!(short(sent.all()), "now [t] b b");
        assert_eq!((sent.compaction().task, &*sent.task()), (Some(4), "now"));
    }

    #[test]
    fn the_oldest_results_go_but_not_the_last() {
        let mut sent = of(&["a", "b", "c"]);
        let (compaction, dropped) = sent.oldest_results(10).expect("results");
        assert_eq!((compaction.results_before, dropped), (3, 1));
        sent.apply(compaction);
        assert_eq!(short(sent.all()), "task a - b b c c");
        let (compaction, dropped) = sent.oldest_results(100_000).expect("results");
        assert_eq!(dropped, 1);
        sent.apply(compaction);
        assert_eq!(short(sent.all()), "task a - b - c c");
        assert!(sent.oldest_results(1).is_none());
    }

    #[test]
    fn what_is_left_out_in_steps_is_left_out_at_once_alike() {
        let mut sent = of(&["a", "b", "c", "d"]);
        let (compaction, _) = sent.oldest_results(600).expect("results");
        sent.apply(compaction);
        compact(&mut sent, 1500, "1").expect("a summary");
        assert_eq!(short(sent.all()), "task [1] b - c c d d");
        let mut again = of(&["a", "b", "c", "d"]);
        again.apply(sent.compaction().clone());
        assert_eq!(format!("{:?}", again.all()), format!("{:?}", sent.all()));
    }
}
