//! The messages that a recorded run sent in each turn: its recorded replies and results, added to a conversation as the
//! loop adds them.

use std::sync::Arc;

use serde_json::Value;
use serde_json::value::RawValue;

use crate::domain::context::Compaction;
use crate::domain::message::{
    AssistantMessage, InvalidArguments, Message, ToolCall, ToolResult, empty_arguments,
};
use crate::domain::recording::{
    CallRecording, CompactionRecording, HistoryMessage, HistoryRole, RunRecording, TurnRecording,
    arguments_text,
};
use crate::engine::conversation::Conversation;
use crate::providers::Reply;

#[derive(Debug)]
pub struct ExpectedMessages {
    conversation: Conversation,
    /// The turns whose reply and results are in the conversation.
    turns: u32,
    /// The turn whose added messages are in the conversation.
    with_added: u32,
}

impl ExpectedMessages {
    /// `loop_warn` is the server's setting.
    pub fn new(run: &RunRecording, loop_warn: u32) -> Self {
        let message = run.message.as_str().into();
        let mut conversation =
            Conversation::new(history(run), message, u32::MAX, usize::MAX, loop_warn, 0);
        if let Some(compaction) = &run.compaction {
            conversation.compact(to_compaction(compaction));
        }
        Self {
            conversation,
            turns: 0,
            with_added: 0,
        }
    }

    /// The messages of the request of this turn. Turns are requested in order.
    pub fn of_turn(&mut self, run: &RunRecording, turn: u32) -> &[Message] {
        while self.turns + 1 < turn {
            self.turns += 1;
            if let Some(recorded) = run.turn(self.turns) {
                self.add(run, recorded);
            }
        }
        if self.with_added < turn {
            self.with_added = turn;
            for text in run.added(turn) {
                self.conversation.push_message(text.as_str().into());
            }
        }
        self.conversation.messages()
    }

    fn add(&mut self, run: &RunRecording, turn: &TurnRecording) {
        let message = reply_message(turn);
        if !message.tool_calls.is_empty() {
            let results = message.tool_calls.iter().enumerate();
            let results = results.map(|(index, call)| {
                let recorded = run.result(turn.turn, index + 1);
                let text = recorded.map_or("", |result| &result.text);
                ToolResult::text(&call.id, text, recorded.is_some_and(|it| it.is_error))
            });
            let results = results.collect();
            self.conversation.restore_reply(turn.turn, message);
            self.conversation.push_results(results);
        } else if let Some(followup) = &turn.followup {
            self.conversation
                .push_followup(turn.turn, message, followup.clone());
        } else {
            // The reply was not the last one, because messages had been sent to the run.
            self.conversation.restore_reply(turn.turn, message);
        }
        if let Some(compaction) = &turn.compaction {
            self.conversation.compact(to_compaction(compaction));
        }
    }
}

/// The messages before the run.
pub fn history(run: &RunRecording) -> Vec<Message> {
    run.history.iter().map(to_message).collect()
}

fn to_message(message: &HistoryMessage) -> Message {
    match message.role {
        HistoryRole::User => Message::user(message.content.as_str()),
        HistoryRole::Assistant => Message::Assistant(AssistantMessage {
            content: message.content.clone(),
            tool_calls: message.calls.iter().map(to_call).collect(),
            echo: None,
        }),
        HistoryRole::Tool => Message::Tool {
            tool_results: message
                .results
                .iter()
                .map(|result| ToolResult::text(&result.call, result.text.as_str(), result.is_error))
                .collect(),
        },
    }
}

/// The recorded reply as the provider sent it.
pub fn reply_message(turn: &TurnRecording) -> AssistantMessage {
    AssistantMessage {
        content: turn.reply.clone(),
        tool_calls: turn.calls.iter().map(to_call).collect(),
        echo: None,
    }
}

/// The recorded summary that was requested before this turn; `None` if that request failed: later requests then omit no
/// more messages than before, only results.
pub fn summary_before(run: &RunRecording, turn: u32) -> Option<Reply> {
    let compaction = match turn.checked_sub(1) {
        None | Some(0) => run.compaction.as_ref()?,
        Some(last) => {
            let compaction = run.turn(last)?.compaction.as_ref()?;
            let mut earlier = run.turns.iter().rev().filter(|turn| turn.turn < last);
            let previous = earlier.find_map(|turn| turn.compaction.as_ref());
            let previous = previous.or(run.compaction.as_ref());
            let is_summary = compaction.before > previous.map_or(0, |it| it.before);
            is_summary.then_some(compaction)?
        }
    };
    let mut reply = Reply::default();
    reply.message.content.clone_from(&compaction.summary);
    Some(reply)
}

/// Arguments as JSON.
pub fn raw_arguments(arguments: &Value) -> Option<Arc<RawValue>> {
    let json = RawValue::from_string(arguments_text(arguments));
    json.ok().map(Arc::from)
}

fn to_call(call: &CallRecording) -> ToolCall {
    let arguments = raw_arguments(&call.arguments);
    let arguments = arguments.filter(|json| json.get().starts_with('{'));
    let invalid_text = call.arguments.as_str().filter(|_| arguments.is_none());
    ToolCall {
        id: call.id.clone(),
        provider_id: String::new(),
        name: call.tool.clone(),
        arguments: arguments.unwrap_or_else(empty_arguments),
        invalid_arguments: invalid_text.map(|text| InvalidArguments::Text(text.into())),
    }
}

pub fn to_compaction(compaction: &CompactionRecording) -> Compaction {
    Compaction {
        before: compaction.before,
        task: compaction.task,
        summary: compaction.summary.clone(),
        results_before: compaction.results_before,
    }
}

#[cfg(test)]
mod tests {
    use super::summary_before;
    use crate::domain::recording::{CompactionRecording, RunRecording, TurnRecording};

    #[test]
    fn a_summary_that_failed_is_not_played_back() {
        let turn = |turn, before: Option<usize>| TurnRecording {
            turn,
            compaction: before.map(|before| CompactionRecording {
                before,
                results_before: 9,
                summary: format!("summary up to {before}"),
                ..CompactionRecording::default()
            }),
            ..TurnRecording::default()
        };
        let run = RunRecording {
            turns: vec![
                turn(1, Some(0)),
                turn(2, Some(3)),
                turn(3, None),
                turn(4, Some(3)),
                turn(5, Some(7)),
            ],
            ..RunRecording::default()
        };
        let summary = |turn| summary_before(&run, turn).map(|reply| reply.message.content);
        assert_eq!(summary(2), None);
        assert_eq!(summary(3).as_deref(), Some("summary up to 3"));
        assert_eq!(summary(4), None);
        assert_eq!(summary(5), None);
        assert_eq!(summary(6).as_deref(), Some("summary up to 7"));
    }
}
