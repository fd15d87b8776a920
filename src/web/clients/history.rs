//! A conversation as clients of other protocols send it, in full: becomes the instructions, the earlier messages and the
//! input of a run, in the order that providers require.

use std::collections::{HashMap, HashSet};

use crate::domain::content::Content;
use crate::domain::message::{AssistantMessage, Message, ToolCall, ToolResult};
use crate::web::error::{Problem, quote};
use crate::web::problem_code::ProblemCode;

/// The user's message before a conversation that begins with a reply.
const NO_MESSAGE: &str = "(no message)";
/// The user's message if the conversation ends with results of tools, which no run waits for.
const CONTINUE: &str = "Continue with these results.";

/// A part of a conversation. Several entries may make one message.
#[derive(Debug)]
pub enum Entry {
    /// For the model, beside the agent's prompt.
    Instructions(String),
    User(Content),
    Reply(String),
    Call(ToolCall),
    Result(ToolResult),
}

/// A conversation in the parts that a run is started with.
#[derive(Debug, Default)]
pub struct History {
    pub instructions: Option<String>,
    /// Ends with a reply, with results, or is empty.
    pub earlier: Vec<Message>,
    /// What the user said last, or what to do with the results at the end.
    pub input: Content,
    /// The results at the end of the conversation, before `new_message`.
    pub new_results: Vec<ToolResult>,
    /// What the user said after these results.
    pub new_message: Option<Content>,
}

/// Builds the history from entries, each with its place in the body.
pub fn build(entries: Vec<(String, Entry)>) -> Result<History, Problem> {
    let mut builder = Builder::default();
    let last = entries.last().map(|(pointer, _)| pointer.clone());
    for (pointer, entry) in entries {
        builder.add(entry).map_err(|why| invalid(&pointer, why))?;
    }
    let pointer = last.unwrap_or_default();
    builder.finish().map_err(|why| invalid(&pointer, why))
}

/// How many messages these entries make.
pub fn count_messages(entries: &[(String, Entry)]) -> usize {
    let mut count = 0;
    let mut last = None;
    for (_, entry) in entries {
        let kind = match entry {
            Entry::Instructions(_) => continue,
            Entry::User(content) if content.is_blank() => continue,
            Entry::Reply(text) if text.trim().is_empty() => continue,
            Entry::User(_) => None,
            Entry::Reply(_) | Entry::Call(_) => Some(true),
            Entry::Result(_) => Some(false),
        };
        if kind.is_none() || kind != last {
            count += 1;
        }
        last = kind;
    }
    count
}

fn invalid(pointer: &str, why: String) -> Problem {
    Problem::field(ProblemCode::InvalidMessages, pointer, why)
}

#[derive(Default)]
struct Builder {
    instructions: Vec<String>,
    messages: Vec<Message>,
    /// The calls of the last reply, by id, each with its position.
    calls: HashMap<String, usize>,
    /// Those of them that have a result.
    answered: HashSet<String>,
}

impl Builder {
    fn add(&mut self, entry: Entry) -> Result<(), String> {
        match entry {
            Entry::Instructions(text) => {
                if !text.trim().is_empty() {
                    self.instructions.push(text);
                }
                Ok(())
            }
            Entry::User(content) if content.is_blank() => Ok(()),
            Entry::User(content) => {
                self.require_results()?;
                self.messages.push(Message::User { content });
                Ok(())
            }
            Entry::Reply(text) if text.trim().is_empty() => Ok(()),
            Entry::Reply(text) => {
                let reply = self.reply()?;
                if !reply.content.is_empty() {
                    reply.content.push_str("\n\n");
                }
                reply.content.push_str(&text);
                Ok(())
            }
            Entry::Call(call) => {
                let position = self.reply()?.tool_calls.len();
                if self.calls.insert(call.id.clone(), position).is_some() {
                    return Err(format!("repeats the call {}", quote(&call.id)));
                }
                self.reply()?.tool_calls.push(call);
                Ok(())
            }
            Entry::Result(result) => self.add_result(result),
        }
    }

    /// The reply that the next part belongs to.
    fn reply(&mut self) -> Result<&mut AssistantMessage, String> {
        self.require_results_unless_reply()?;
        if !matches!(self.messages.last(), Some(Message::Assistant(_))) {
            if self.messages.is_empty() {
                self.messages.push(Message::user(NO_MESSAGE));
            }
            let reply = AssistantMessage::default();
            self.messages.push(Message::Assistant(reply));
            self.calls.clear();
            self.answered.clear();
        }
        match self.messages.last_mut() {
            Some(Message::Assistant(reply)) => Ok(reply),
            _ => Err("follows no message".to_owned()),
        }
    }

    fn add_result(&mut self, result: ToolResult) -> Result<(), String> {
        let id = quote(&result.call_id);
        let is_new = matches!(self.messages.last(), Some(Message::Assistant(_)));
        if is_new {
            let tool_results = Vec::new();
            self.messages.push(Message::Tool { tool_results });
        }
        let Some(Message::Tool { tool_results }) = self.messages.last_mut() else {
            return Err(format!("answers {id}, which no reply before it calls"));
        };
        if !self.calls.contains_key(&result.call_id) {
            return Err(format!(
                "answers {id}, which the reply before it does not call"
            ));
        }
        if !self.answered.insert(result.call_id.clone()) {
            return Err(format!("is a second result of the call {id}"));
        }
        tool_results.push(result);
        Ok(())
    }

    /// All calls of the last reply have results, which get the order of the calls.
    fn require_results(&mut self) -> Result<(), String> {
        let calls = match self.messages.as_mut_slice() {
            [.., Message::Assistant(reply)] => &reply.tool_calls,
            [
                ..,
                Message::Assistant(reply),
                Message::Tool { tool_results },
            ] => {
                tool_results.sort_by_key(|result| self.calls.get(&result.call_id).copied());
                &reply.tool_calls
            }
            _ => return Ok(()),
        };
        match calls.iter().find(|call| !self.answered.contains(&call.id)) {
            None => Ok(()),
            Some(call) => Err(format!(
                "the call {} before it has no result",
                quote(&call.id)
            )),
        }
    }

    fn require_results_unless_reply(&mut self) -> Result<(), String> {
        match self.messages.last() {
            Some(Message::Assistant(_)) => Ok(()),
            _ => self.require_results(),
        }
    }

    fn finish(mut self) -> Result<History, String> {
        self.require_results()?;
        let instructions = self.instructions.join("\n\n");
        let mut history = History {
            instructions: (!instructions.is_empty()).then_some(instructions),
            ..History::default()
        };
        let has_message = matches!(self.messages.last(), Some(Message::User { .. }));
        if has_message && let Some(Message::User { content }) = self.messages.pop() {
            history.input = content;
        }
        if let Some(Message::Tool { tool_results }) = self.messages.last() {
            history.new_results.clone_from(tool_results);
            if has_message {
                history.new_message = Some(history.input.clone());
            } else {
                history.input = CONTINUE.into();
            }
        } else if !has_message && !self.messages.is_empty() {
            return Err("is the last message, and it is a reply; end with a user's".to_owned());
        }
        history.earlier = self.messages;
        Ok(history)
    }
}

#[cfg(test)]
mod tests {
    use super::{Entry, History, build};
    use crate::domain::message::{Message, ToolCall, ToolResult, empty_arguments};

    fn call(id: &str) -> Entry {
        Entry::Call(ToolCall {
            id: id.to_owned(),
            provider_id: String::new(),
            name: "look".to_owned(),
            arguments: empty_arguments(),
            invalid_arguments: None,
        })
    }

    fn result(id: &str) -> Entry {
        Entry::Result(ToolResult::text(id, id, false))
    }

    fn user(text: &str) -> Entry {
        Entry::User(text.into())
    }

    fn reply(text: &str) -> Entry {
        Entry::Reply(text.to_owned())
    }

    fn try_build(entries: impl IntoIterator<Item = Entry>) -> Result<History, String> {
        let entries = entries.into_iter().enumerate();
        build(entries.map(|(at, it)| (format!("/{at}"), it)).collect())
            .map_err(|problem| problem.detail().to_owned())
    }

    #[test]
    fn many_calls_take_no_longer_than_their_number_asks_for() {
        let ids: Vec<String> = (0..40_000).map(|n| format!("call_{n}")).collect();
        let calls = ids.iter().map(|id| call(id));
        let results = ids.iter().rev().map(|id| result(id));
        let history = try_build([user("a")].into_iter().chain(calls).chain(results));
        let history = history.expect("a history");
        let answered = history.new_results.iter().map(|it| &it.call_id);
        assert!(answered.eq(&ids), "in the order of the calls");
    }

    #[test]
    fn a_conversation_is_split_before_the_last_message() {
        let instructions = Entry::Instructions("Be brief.".to_owned());
        let history = try_build([instructions, user("a"), reply("b"), reply("c"), user("d")]);
        let history = history.expect("a history");
        assert_eq!(history.instructions.as_deref(), Some("Be brief."));
        assert_eq!(history.input, "d".into());
        let [Message::User { .. }, Message::Assistant(message)] = history.earlier.as_slice() else {
            panic!("{:?}", history.earlier);
        };
        assert_eq!(message.content, "b\n\nc");
    }

    #[test]
    fn results_at_the_end_are_new_and_in_the_order_of_their_calls() {
        let history = try_build([user("a"), call("1"), call("2"), result("2"), result("1")]);
        let history = history.expect("a history");
        let ids: Vec<&str> = history
            .new_results
            .iter()
            .map(|it| it.call_id.as_str())
            .collect();
        assert_eq!((ids, history.new_message), (vec!["1", "2"], None));
        let followed = try_build([user("a"), call("1"), result("1"), user("b")]);
        assert_eq!(followed.expect("a history").new_message, Some("b".into()));
        let older = try_build([user("a"), call("1"), result("1"), reply("b"), user("c")]);
        assert!(older.expect("a history").new_results.is_empty());
    }

    #[test]
    fn a_wrong_order_names_the_place() {
        for (entries, expected) in [
            (
                vec![user("a"), call("1"), user("b")],
                "/2: the call \"1\" before it has no result",
            ),
            (
                vec![user("a"), call("1")],
                "/1: the call \"1\" before it has no result",
            ),
            (
                vec![user("a"), result("1")],
                "/1: answers \"1\", which no reply before it calls",
            ),
            (
                vec![user("a"), call("1"), call("1")],
                "/2: repeats the call \"1\"",
            ),
            (
                vec![user("a"), reply("b")],
                "/1: is the last message, and it is a reply; end with a user's",
            ),
        ] {
            assert_eq!(try_build(entries).expect_err("a problem"), expected);
        }
    }
}
