//! What was said in a run, put together from its record, and how a session's next run goes on with it: trimmed to its
//! bounds, whole turns at a time. Knows no loop.

use std::collections::BTreeMap;

use crate::config::AttachmentLimits;
use crate::domain::context::Compaction;
use crate::domain::message::{Message, ToolResult};
use crate::domain::run::{Run, Status};
use crate::engine::parts::Engine;
use crate::providers::thinking;
use crate::store::{SessionQuery, Step, StoreError};

/// Stands where earlier messages were left out.
const NOTICE: &str = "[Earlier messages of this conversation were left out.]";

/// A run's conversation as recorded.
#[derive(Debug, Default)]
pub struct Recorded {
    /// The system prompt; none where the run never came to have one.
    pub system: Option<String>,
    /// Its messages, oldest first, with those that came before the run.
    pub messages: Vec<Message>,
    /// What its last request left out of them.
    pub compaction: Option<Compaction>,
}

impl Recorded {
    /// The conversation that these steps are: results are recorded as they come, and read in the order of their calls.
    pub fn of(steps: Vec<Step>) -> Self {
        let mut results: BTreeMap<(u32, u32), ToolResult> = BTreeMap::new();
        let mut others = Vec::with_capacity(steps.len());
        for step in steps {
            match step {
                Step::Result {
                    turn,
                    position,
                    result,
                } => drop(results.insert((turn, position), result)),
                other => others.push(other),
            }
        }
        let mut talk = Self::default();
        for step in others {
            match step {
                Step::Prompt {
                    system,
                    message,
                    earlier,
                } => {
                    talk.system = Some(system);
                    // A run that had to wait stands there with its message alone, and again with its whole prompt.
                    talk.messages = earlier;
                    talk.messages.push(Message::User { content: message });
                    for said in &mut talk.messages {
                        if let Message::User { content } = said {
                            *content = std::mem::take(content).into_shown();
                        }
                    }
                    talk.compaction = None;
                }
                Step::Reply { turn, message } => {
                    talk.messages.push(Message::Assistant(message));
                    let later = results.split_off(&(turn + 1, 0));
                    let tool_results: Vec<_> = std::mem::replace(&mut results, later)
                        .into_values()
                        .collect();
                    if !tool_results.is_empty() {
                        talk.messages.push(Message::Tool { tool_results });
                    }
                }
                Step::Remembers { .. } => {}
                Step::Said { content } => talk.messages.push(Message::user(content)),
                Step::Compacted { compaction } => talk.compaction = Some(compaction),
                Step::Result { .. } | Step::Compacting => {}
            }
        }
        talk
    }
}

/// What a run of a session goes on with.
#[derive(Debug, Default)]
pub struct Earlier {
    /// The messages.
    pub messages: Vec<Message>,
    /// What requests leave out of them: what the last run's left out.
    pub compaction: Option<Compaction>,
}

/// How much of a session's conversation its next run goes on with.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Messages.
    pub messages: usize,
    /// Bytes of their texts, arguments included.
    pub bytes: usize,
    /// Their pictures and files: as many, and half of the bytes, so that the next message has a place.
    pub attachments: AttachmentLimits,
}

/// What a run of a session goes on with: the conversation of the last completed run of that session and agent. Read when
/// it is the run's turn, as those before it have ended then.
pub async fn earlier(engine: &Engine, run: &Run) -> Result<Earlier, StoreError> {
    let Some(name) = &run.session else {
        return Ok(Earlier::default());
    };
    let store = engine.journal.store();
    let last = SessionQuery {
        owner: run.owner.clone(),
        name: name.clone(),
        agent: Some(run.agent.clone()),
        status: Some(Status::Completed),
        before: None,
        limit: 1,
    };
    let Some(last) = store.session(last).await?.pop() else {
        return Ok(Earlier::default());
    };
    let talk = Recorded::of(store.steps(last.id).await?);
    let count = talk.messages.len();
    let mut messages = trimmed(talk.messages, engine.settings.session);
    let compaction = talk.compaction.map(|compaction| {
        let gone = count.saturating_sub(messages.len());
        if compaction.before > gone || compaction.before == 0 {
            return compaction.without(gone);
        }
        // The summary needs a message that it stands for.
        messages.insert(0, Message::user(NOTICE));
        Compaction {
            before: 1,
            task: None,
            ..compaction.without(gone.saturating_sub(1))
        }
    });
    Ok(Earlier {
        messages,
        compaction,
    })
}

/// The messages, or as many of the last ones as the bounds allow, with a notice before them. They begin with a user's
/// message where one fits, else with a reply, and never with the results of calls that are gone.
fn trimmed(mut messages: Vec<Message>, bounds: Bounds) -> Vec<Message> {
    let mut bytes = 0;
    let (mut attachments, mut attached_bytes) = (0, 0);
    let mut begins = None;
    for (at, message) in messages.iter().enumerate().rev() {
        bytes += size(message);
        attachments += message.attachments().count();
        attached_bytes += attached(message);
        if bytes > bounds.bytes
            || messages.len() - at > bounds.messages
            || attachments > bounds.attachments.count
            || attached_bytes > bounds.attachments.total / 2
        {
            break;
        }
        match (message, begins) {
            (Message::User { .. }, _) => begins = Some(at),
            (Message::Assistant(_), None) => begins = Some(at),
            (Message::Assistant(_), Some(last)) if !is_user(&messages[last]) => begins = Some(at),
            _ => {}
        }
    }
    if begins == Some(0) || messages.is_empty() {
        return messages;
    }
    messages.drain(..begins.unwrap_or(messages.len()));
    match messages.first_mut() {
        // One message, as some models take no two of a user's in a row.
        Some(Message::User { content }) => content.prepend(NOTICE),
        _ => messages.insert(0, Message::user(NOTICE)),
    }
    thinking::drop(&mut messages);
    messages
}

/// Bytes of the pictures and files of a message.
pub fn attached(message: &Message) -> usize {
    let bytes = message.attachments().map(|attachment| attachment.bytes);
    usize::try_from(bytes.sum::<u64>()).unwrap_or(usize::MAX)
}

fn is_user(message: &Message) -> bool {
    matches!(message, Message::User { .. })
}

/// Bytes of a message: its text, arguments, results, and the provider's own form of it. Its pictures and files count by
/// themselves: see [`attached`].
pub fn size(message: &Message) -> usize {
    match message {
        Message::User { content } => content.text_bytes(),
        Message::Assistant(said) => {
            let calls = said.tool_calls.iter();
            let calls = calls.map(|call| call.name.len() + call.arguments.get().len());
            let echo = said.echo.as_ref().map_or(0, |echo| echo.body.get().len());
            said.content.len() + calls.sum::<usize>() + echo
        }
        Message::Tool { tool_results } => {
            tool_results.iter().map(|result| result.content.len()).sum()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Bounds, NOTICE, Recorded, trimmed};
    use crate::config::AttachmentLimits;
    use crate::domain::attachment::Attachment;
    use crate::domain::content::Content;
    use crate::domain::message::{AssistantMessage, Message, ToolCall, ToolResult, no_arguments};
    use crate::store::Step;

    const BOUNDS: Bounds = Bounds {
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
            arguments: no_arguments(),
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

    fn told(messages: &[Message]) -> String {
        let words: Vec<String> = messages
            .iter()
            .map(|message| match message {
                Message::User { content } => {
                    format!("u:{}", content.plain().replace(NOTICE, "…"))
                }
                Message::Assistant(said) => format!("a:{}", said.content),
                Message::Tool { tool_results } => format!("t:{}", tool_results.len()),
            })
            .collect();
        words.join("|").replace('\n', "")
    }

    fn talk() -> Vec<Message> {
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
    fn whole_turns_go_from_the_front() {
        let most = |messages: usize| told(&trimmed(talk(), Bounds { messages, ..BOUNDS }));
        let whole = "u:1|a:one|u:2|a:calls c1|t:1|a:calls c2|t:1|a:two";
        assert_eq!(most(8), whole);
        assert_eq!(most(7), "u:…2|a:calls c1|t:1|a:calls c2|t:1|a:two");
        assert_eq!(most(6), "u:…2|a:calls c1|t:1|a:calls c2|t:1|a:two");
        // The last exchange alone is too much: calls go with their results.
        for (messages, left) in [
            (5, "u:…|a:calls c1|t:1|a:calls c2|t:1|a:two"),
            (4, "u:…|a:calls c2|t:1|a:two"),
            (3, "u:…|a:calls c2|t:1|a:two"),
            (2, "u:…|a:two"),
            (1, "u:…|a:two"),
            (0, "u:…"),
        ] {
            assert_eq!(most(messages), left, "{messages}");
        }
    }

    #[test]
    fn pictures_count_by_themselves() {
        let picture = |text: &str| {
            let data = bytes::Bytes::from(format!("GIF89a{text}"));
            let picture = Attachment::of(data, None).expect("a picture");
            Message::user(Content::Parts(vec![picture.into()]))
        };
        let said = Message::Assistant(reply("x"));
        let left = |texts: &[&str]| {
            let exchange = |text: &&str| [picture(text), said.clone()];
            let messages = texts.iter().flat_map(exchange).collect();
            let left = trimmed(messages, BOUNDS);
            left.iter().flat_map(Message::attachments).count()
        };
        assert_eq!(left(&["a"]), 1);
        assert_eq!(left(&["", "", ""]), 1, "half of the bytes");
        assert_eq!(left(&["too large"]), 0);
    }

    #[test]
    fn bytes_count_too_and_the_notice_is_told_once() {
        let bounds = |bytes| Bounds { bytes, ..BOUNDS };
        assert_eq!(told(&trimmed(talk(), bounds(3))), "u:…|a:two");
        assert!(trimmed(Vec::new(), bounds(0)).is_empty());
        let mut again = trimmed(
            talk(),
            Bounds {
                messages: 6,
                ..BOUNDS
            },
        );
        again.extend([user("3"), Message::Assistant(reply("three"))]);
        assert_eq!(
            told(&trimmed(again.clone(), bounds(1000))),
            told(&again),
            "what fits stays as it is"
        );
        assert_eq!(told(&trimmed(again, bounds(10))), "u:…3|a:three");
    }

    #[test]
    fn earlier_messages_come_before_the_runs_own() {
        let prompt = |system: &str| Step::Prompt {
            system: system.to_owned(),
            message: "go".into(),
            earlier: talk(),
        };
        let turn = |turn, text| Step::Reply {
            turn,
            message: reply(text),
        };
        let came = |turn, position, id| Step::Result {
            turn,
            position,
            result: result(id),
        };
        let recorded = Recorded::of(vec![
            prompt(""),
            prompt("be brief"),
            turn(1, "calls c3"),
            came(1, 1, "late"),
            came(1, 0, "c3"),
            turn(2, "done"),
        ]);
        assert_eq!(recorded.system.as_deref(), Some("be brief"));
        let whole = told(&recorded.messages);
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
