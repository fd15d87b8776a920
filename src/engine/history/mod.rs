//! Reads the record of runs: the conversation of one, and the trimmed history that a session's next run receives.

use std::collections::BTreeMap;

use crate::domain::context::Compaction;
use crate::domain::message::{Message, ToolResult};
use crate::domain::run::{Run, Status};
use crate::engine::context::Engine;
use crate::engine::settings::HistoryLimits;
use crate::providers::reasoning;
use crate::record::entry::{self, Entry};
use crate::store::StoreError;
use crate::store::runs::SessionQuery;

pub mod held_time;
pub mod run_diff;
pub mod run_log;
pub mod time_spent;
pub mod tree_reads;

/// Replaces omitted messages.
const OMITTED_NOTICE: &str = "[Earlier messages of this conversation were left out.]";

#[derive(Debug, Default)]
pub struct RecordedConversation {
    /// `None` if the run never had a prompt.
    pub system: Option<String>,
    /// Oldest first, including those from before the run.
    pub messages: Vec<Message>,
    /// What the last request omitted.
    pub compaction: Option<Compaction>,
}

impl RecordedConversation {
    /// Steps record results in the order of completion; the conversation has them in the order of their calls.
    pub fn from_steps(steps: Vec<Entry>) -> Self {
        let mut results: BTreeMap<(u32, u32), ToolResult> = BTreeMap::new();
        let mut others = Vec::with_capacity(steps.len());
        for step in steps {
            match step {
                Entry::CallCompleted {
                    turn,
                    position,
                    result,
                    ..
                } => drop(results.insert((turn, position), result)),
                other => others.push(other),
            }
        }
        let mut conversation = Self::default();
        let (mut added, mut read_count) = (Vec::new(), 0);
        let mut prompt_end = 0;
        for step in others {
            match step {
                Entry::Prompted {
                    system,
                    message,
                    mut earlier,
                    compaction,
                } => {
                    conversation.system = Some(system);
                    earlier.push(Message::User { content: message });
                    for recorded_message in &mut earlier {
                        if let Message::User { content } = recorded_message {
                            *content = std::mem::take(content).into_redacted();
                        }
                    }
                    // A run that was queued recorded its messages first, and its whole prompt later. A fork may have
                    // copied replies in between.
                    let replies = conversation.messages.split_off(prompt_end);
                    prompt_end = earlier.len();
                    conversation.messages = earlier;
                    conversation.messages.extend(replies);
                    conversation.compaction = compaction;
                }
                Entry::Replied { turn, message, .. } => {
                    conversation.messages.push(Message::Assistant(message));
                    let later = results.split_off(&(turn + 1, 0));
                    let tool_results: Vec<_> = std::mem::replace(&mut results, later)
                        .into_values()
                        .collect();
                    if !tool_results.is_empty() {
                        conversation.messages.push(Message::Tool { tool_results });
                    }
                }
                Entry::Remembers { .. } => {}
                Entry::MessageAdded { content, .. } => added.push(content.into_redacted()),
                Entry::MessagesRead { last, .. } => {
                    let read =
                        added.drain(..added.len().min((last as usize).saturating_sub(read_count)));
                    conversation
                        .messages
                        .extend(read.map(|content| Message::User { content }));
                    read_count = last as usize;
                }
                Entry::Followup { content } => conversation.messages.push(Message::user(content)),
                Entry::Compacted { compaction, .. } => conversation.compaction = Some(compaction),
                Entry::Event(_)
                | Entry::CallCompleted { .. }
                | Entry::CallDecided { .. }
                | Entry::CallSuspended { .. }
                | Entry::Compacting => {}
            }
        }
        conversation
    }
}

#[derive(Debug, Default)]
pub struct SessionHistory {
    pub messages: Vec<Message>,
    /// What requests omit of the messages, as the last run's requests did.
    pub compaction: Option<Compaction>,
}

/// The conversation of the session's last completed run of the same agent. Call it once the earlier runs of the session
/// have ended.
pub async fn session_history(engine: &Engine, run: &Run) -> Result<SessionHistory, StoreError> {
    let Some(name) = &run.session else {
        return Ok(SessionHistory::default());
    };
    let store = engine.journal.store();
    let query = SessionQuery {
        owner: run.owner.clone(),
        name: name.clone(),
        agent: Some(run.agent.clone()),
        status: Some(Status::Completed),
        before: None,
        limit: 1,
        cut_texts: false,
        skip_damaged: false,
    };
    let Some(last) = store.session_runs(query).await?.pop() else {
        return Ok(SessionHistory::default());
    };
    let conversation =
        RecordedConversation::from_steps(entry::steps(store.entries(last.id).await?));
    let count = conversation.messages.len();
    let mut messages = trim(conversation.messages, engine.settings.history_limits);
    let compaction = conversation.compaction.map(|compaction| {
        let removed = count.saturating_sub(messages.len());
        if compaction.before > removed || compaction.before == 0 {
            return compaction.without_first(removed);
        }
        // A summary must replace a message.
        messages.insert(0, Message::user(OMITTED_NOTICE));
        Compaction {
            before: 1,
            task: None,
            ..compaction.without_first(removed.saturating_sub(1))
        }
    });
    Ok(SessionHistory {
        messages,
        compaction,
    })
}

/// The messages, or the last ones that the limits allow after a notice. They begin with a user message if one fits,
/// else with a reply, and never with the results of omitted calls.
fn trim(mut messages: Vec<Message>, limits: HistoryLimits) -> Vec<Message> {
    let mut bytes = 0;
    let (mut attachments, mut attached_bytes) = (0, 0);
    let mut start = None;
    for (index, message) in messages.iter().enumerate().rev() {
        bytes += message_bytes(message);
        attachments += message.attachments().count();
        attached_bytes += attachment_bytes(message);
        if bytes > limits.bytes
            || messages.len() - index > limits.messages
            || attachments > limits.attachments.count
            || attached_bytes > limits.attachments.total / 2
        {
            break;
        }
        match (message, start) {
            (Message::User { .. }, _) => start = Some(index),
            (Message::Assistant(_), None) => start = Some(index),
            (Message::Assistant(_), Some(last)) if !is_user(&messages[last]) => start = Some(index),
            _ => {}
        }
    }
    if start == Some(0) || messages.is_empty() {
        return messages;
    }
    messages.drain(..start.unwrap_or(messages.len()));
    match messages.first_mut() {
        // One message, because some models reject two user messages in a row.
        Some(Message::User { content }) => content.prepend(OMITTED_NOTICE),
        _ => messages.insert(0, Message::user(OMITTED_NOTICE)),
    }
    reasoning::strip_reasoning(&mut messages);
    messages
}

/// The bytes of a message's images and files.
pub fn attachment_bytes(message: &Message) -> usize {
    let bytes = message.attachments().map(|attachment| attachment.bytes);
    usize::try_from(bytes.sum::<u64>()).unwrap_or(usize::MAX)
}

fn is_user(message: &Message) -> bool {
    matches!(message, Message::User { .. })
}

/// The bytes of a message's text, calls, results and provider data. Images and files are counted by
/// [`attachment_bytes`].
pub fn message_bytes(message: &Message) -> usize {
    match message {
        Message::User { content } => content.text_bytes(),
        Message::Assistant(reply) => {
            let calls = reply.tool_calls.iter();
            let calls = calls.map(|call| {
                let ids = call.id.len() + call.provider_id.len();
                ids + call.name.len() + call.sent_arguments().len()
            });
            let echo = reply.echo.as_ref().map_or(0, |echo| echo.body.get().len());
            reply.content.len() + calls.sum::<usize>() + echo
        }
        Message::Tool { tool_results } => {
            let results = tool_results.iter();
            let results = results.map(|result| result.call_id.len() + result.content.len());
            results.sum()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{OMITTED_NOTICE, RecordedConversation, message_bytes, trim};
    use crate::config::AttachmentLimits;
    use crate::domain::attachment::Attachment;
    use crate::domain::content::Content;
    use crate::domain::message::{
        AssistantMessage, Message, ToolCall, ToolResult, empty_arguments,
    };
    use crate::engine::settings::HistoryLimits;
    use crate::record::entry::{Entry, ReplyReport};

    const LIMITS: HistoryLimits = HistoryLimits {
        messages: 100,
        bytes: 1000,
        attachments: AttachmentLimits {
            count: 2,
            bytes: 20,
            total: 20,
        },
    };

    fn user(text: &str) -> Message {
        Message::user(text)
    }

    fn reply(text: &str) -> AssistantMessage {
        let call = text.strip_prefix("calls ").map(|id| ToolCall {
            id: id.to_owned(),
            provider_id: String::new(),
            name: "t".to_owned(),
            arguments: empty_arguments(),
            invalid_arguments: None,
        });
        AssistantMessage {
            content: text.to_owned(),
            tool_calls: call.into_iter().collect(),
            echo: None,
        }
    }

    fn result(id: &str) -> ToolResult {
        ToolResult::text(id, format!("of {id}"), false)
    }

    fn describe(messages: &[Message]) -> String {
        let parts: Vec<String> = messages
            .iter()
            .map(|message| match message {
                Message::User { content } => {
                    format!("u:{}", content.to_plain_text().replace(OMITTED_NOTICE, "…"))
                }
                Message::Assistant(assistant) => format!("a:{}", assistant.content),
                Message::Tool { tool_results } => format!("t:{}", tool_results.len()),
            })
            .collect();
        parts.join("|").replace('\n', "")
    }

    fn conversation() -> Vec<Message> {
        vec![
            user("1"),
            Message::Assistant(reply("one")),
            user("2"),
            Message::Assistant(reply("calls c1")),
            Message::Tool {
                tool_results: vec![result("c1")],
            },
            Message::Assistant(reply("calls c2")),
            Message::Tool {
                tool_results: vec![result("c2")],
            },
            Message::Assistant(reply("two")),
        ]
    }

    #[test]
    fn whole_turns_are_dropped_from_the_front() {
        let trimmed_to =
            |messages: usize| describe(&trim(conversation(), HistoryLimits { messages, ..LIMITS }));
        let whole = "u:1|a:one|u:2|a:calls c1|t:1|a:calls c2|t:1|a:two";
        assert_eq!(trimmed_to(8), whole);
        assert_eq!(trimmed_to(7), "u:…2|a:calls c1|t:1|a:calls c2|t:1|a:two");
        assert_eq!(trimmed_to(6), "u:…2|a:calls c1|t:1|a:calls c2|t:1|a:two");
        // The last exchange alone is too large: calls are omitted together with their results.
        for (messages, expected) in [
            (5, "u:…|a:calls c1|t:1|a:calls c2|t:1|a:two"),
            (4, "u:…|a:calls c2|t:1|a:two"),
            (3, "u:…|a:calls c2|t:1|a:two"),
            (2, "u:…|a:two"),
            (1, "u:…|a:two"),
            (0, "u:…"),
        ] {
            assert_eq!(trimmed_to(messages), expected, "{messages}");
        }
    }

    #[test]
    fn pictures_have_their_own_limits() {
        let picture = |text: &str| {
            let data = bytes::Bytes::from(format!("GIF89a{text}"));
            let picture = Attachment::from_bytes(data, None).expect("a picture");
            Message::user(Content::Parts(vec![picture.into()]))
        };
        let assistant = Message::Assistant(reply("x"));
        let attachments_after_trim = |texts: &[&str]| {
            let exchange = |text: &&str| [picture(text), assistant.clone()];
            let messages = texts.iter().flat_map(exchange).collect();
            let trimmed = trim(messages, LIMITS);
            trimmed.iter().flat_map(Message::attachments).count()
        };
        assert_eq!(attachments_after_trim(&["a"]), 1);
        assert_eq!(
            attachments_after_trim(&["", "", ""]),
            1,
            "half of the bytes"
        );
        assert_eq!(attachments_after_trim(&["too large"]), 0);
    }

    #[test]
    fn bytes_are_limited_and_the_notice_appears_once() {
        let limits = |bytes| HistoryLimits { bytes, ..LIMITS };
        assert_eq!(describe(&trim(conversation(), limits(3))), "u:…|a:two");
        assert!(trim(Vec::new(), limits(0)).is_empty());
        let mut continued = trim(
            conversation(),
            HistoryLimits {
                messages: 6,
                ..LIMITS
            },
        );
        continued.extend([user("3"), Message::Assistant(reply("three"))]);
        assert_eq!(
            describe(&trim(continued.clone(), limits(1000))),
            describe(&continued),
            "what fits stays as it is"
        );
        assert_eq!(describe(&trim(continued, limits(10))), "u:…3|a:three");
    }

    #[test]
    fn the_ids_of_calls_count() {
        let calls = |id: &str| {
            let results = Message::Tool {
                tool_results: vec![ToolResult::text(id, "x", false)],
            };
            let mut message = reply("calls c");
            message.tool_calls[0].id = id.to_owned();
            message_bytes(&Message::Assistant(message)) + message_bytes(&results)
        };
        assert_eq!(calls(&"c".repeat(1000)) - calls("c"), 2 * 999);
    }

    #[test]
    fn earlier_messages_come_before_the_runs_own() {
        let prompt = |system: &str| Entry::Prompted {
            system: system.to_owned(),
            message: "go".into(),
            earlier: conversation(),
            compaction: None,
        };
        let reply_step = |turn, text| Entry::Replied {
            turn,
            message: reply(text),
            report: ReplyReport::default(),
        };
        let result_step = |turn, position, id| Entry::CallCompleted {
            turn,
            position,
            tool: String::new(),
            duration_ms: 0,
            result: result(id),
            refused_by: Vec::new(),
        };
        let recorded = RecordedConversation::from_steps(vec![
            prompt(""),
            prompt("be brief"),
            reply_step(1, "calls c3"),
            result_step(1, 1, "late"),
            result_step(1, 0, "c3"),
            reply_step(2, "done"),
        ]);
        assert_eq!(recorded.system.as_deref(), Some("be brief"));
        let whole = describe(&recorded.messages);
        assert!(
            whole.ends_with("a:two|u:go|a:calls c3|t:2|a:done"),
            "{whole}"
        );
        let Some(Message::Tool { tool_results }) = recorded.messages.get(10) else {
            panic!("no results in {whole}");
        };
        assert_eq!(tool_results[0].call_id, "c3");
    }
}
