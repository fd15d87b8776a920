//! Which steps of a run a fork keeps, and what it changes in them. Pure: no I/O.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::domain::content::Content;
use crate::domain::message::{AssistantMessage, Message, ToolCall, ToolResult};
use crate::engine::fork::request::{ForkEdit, ForkError};
use crate::providers::reasoning;
use crate::record::entry::Entry;

/// Where the record of a run is cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cut {
    /// The turn is requested anew; 0 and 1 are the first.
    BeforeTurn(u32),
    /// The reply is kept, and its calls are executed.
    AfterReply(u32),
    /// In this delegation, which continues.
    InCall(String),
    /// After the last step. `is_failed`: a final text is not kept, because the run did not end with it.
    AtEnd { is_failed: bool },
}

/// A call without a result.
#[derive(Clone, Debug)]
pub struct OpenCall {
    pub turn: u32,
    pub call: ToolCall,
}

#[derive(Clone, Debug, Default)]
pub struct KeptSteps {
    pub steps: Vec<Entry>,
    /// The turn of the last reply; 0 for none.
    pub turns: u32,
    /// The number of messages that clients added.
    pub messages: u32,
    pub open_calls: Vec<OpenCall>,
    /// The calls whose results are as recorded.
    pub recorded_calls: HashSet<String>,
    /// Whether the last reply is the final text: it has no calls, and no message follows it.
    pub is_final: bool,
}

/// The steps that are kept.
///
/// # Errors
/// The range of turns, as a text, if the turn is out of it.
pub fn cut(steps: Vec<Entry>, at: &Cut) -> Result<KeptSteps, String> {
    let last = last_turn(&steps);
    let end = match at {
        Cut::BeforeTurn(0 | 1) => reply_position(&steps, 1).unwrap_or(steps.len()),
        Cut::BeforeTurn(turn) => match reply_position(&steps, *turn) {
            Some(position) => position,
            None if *turn == last + 1 && is_next_requested(&steps) => steps.len(),
            None => return Err(range_message(&steps, last)),
        },
        Cut::AfterReply(turn) => match reply_position(&steps, *turn) {
            Some(position) => position + 1,
            None if last == 0 => return Err("the run has no reply yet".to_owned()),
            None => return Err(format!("the run has the replies 1 to {last}")),
        },
        Cut::InCall(call) => {
            let position = steps.iter().position(|step| makes_call(step, call));
            let position = position.unwrap_or(steps.len());
            let next = steps.iter().skip(position + 1).position(is_reply);
            next.map_or(steps.len(), |next| position + 1 + next)
        }
        Cut::AtEnd { is_failed } => match *is_failed && ends_with_text(&steps) {
            true => reply_position(&steps, last).unwrap_or(steps.len()),
            false => steps.len(),
        },
    };
    let mut steps = steps;
    steps.truncate(end);
    if matches!(at, Cut::BeforeTurn(_)) {
        drop_unread(&mut steps);
    }
    let open_call = match at {
        Cut::InCall(call) => {
            let reply = steps.iter().rposition(is_reply).unwrap_or(0);
            // What follows the results was for a request that is not sent before the delegation ends.
            let mut position = 0;
            steps.retain(|step| {
                position += 1;
                position <= reply + 1
                    || matches!(
                        step,
                        Entry::CallCompleted { .. }
                            | Entry::MessageAdded { .. }
                            | Entry::CallDecided { .. }
                    )
            });
            Some(call.clone())
        }
        _ => None,
    };
    Ok(kept(steps, &open_call))
}

/// What is kept of these steps; the result of `open_call` is not.
fn kept(mut steps: Vec<Entry>, open_call: &Option<String>) -> KeptSteps {
    steps.retain_mut(|step| match step {
        // They are about requests and entries of the source.
        Entry::Remembers { .. } | Entry::Compacting => false,
        Entry::CallCompleted {
            result, refused_by, ..
        } => {
            refused_by.clear();
            open_call.as_ref() != Some(&result.call_id)
        }
        _ => true,
    });
    let results: HashSet<(u32, u32)> = steps.iter().filter_map(result_position).collect();
    let mut kept = KeptSteps::default();
    for step in &steps {
        let Entry::Replied { turn, message, .. } = step else {
            kept.is_final &= !continues_text(step);
            kept.messages += u32::from(matches!(step, Entry::MessageAdded { .. }));
            continue;
        };
        kept.turns = *turn;
        kept.is_final = message.tool_calls.is_empty();
        for (position, call) in (0_u32..).zip(&message.tool_calls) {
            match results.contains(&(*turn, position)) {
                true => drop(kept.recorded_calls.insert(call.id.clone())),
                false => kept.open_calls.push(OpenCall {
                    turn: *turn,
                    call: call.clone(),
                }),
            }
        }
    }
    kept.steps = steps;
    kept
}

/// Whether the model is requested again after a text.
fn continues_text(step: &Entry) -> bool {
    matches!(step, Entry::Followup { .. } | Entry::MessagesRead { .. })
}

/// Drops the messages that no kept request has.
fn drop_unread(steps: &mut Vec<Entry>) {
    let read = steps.iter().filter_map(|step| match step {
        Entry::MessagesRead { last, .. } => Some(*last),
        _ => None,
    });
    let last_read = read.max().unwrap_or(0);
    let mut number = 0;
    steps.retain(|step| {
        number += u32::from(matches!(step, Entry::MessageAdded { .. }));
        number <= last_read || !matches!(step, Entry::MessageAdded { .. })
    });
}

fn is_reply(step: &Entry) -> bool {
    matches!(step, Entry::Replied { .. })
}

fn makes_call(step: &Entry, id: &str) -> bool {
    matches!(step, Entry::Replied { message, .. } if message.tool_calls.iter().any(|call| call.id == id))
}

fn result_position(step: &Entry) -> Option<(u32, u32)> {
    match step {
        Entry::CallCompleted { turn, position, .. } => Some((*turn, *position)),
        _ => None,
    }
}

fn reply_position(steps: &[Entry], wanted: u32) -> Option<usize> {
    let has_turn = |step: &Entry| matches!(step, Entry::Replied { turn, .. } if *turn == wanted);
    steps.iter().position(has_turn)
}

fn last_turn(steps: &[Entry]) -> u32 {
    let turns = steps.iter().filter_map(|step| match step {
        Entry::Replied { turn, .. } => Some(*turn),
        _ => None,
    });
    turns.max().unwrap_or(0)
}

/// Whether the next step of the run is a request.
fn is_next_requested(steps: &[Entry]) -> bool {
    let Some(Entry::Replied { turn, message, .. }) = steps.iter().rfind(|step| is_reply(step))
    else {
        return false;
    };
    let results = steps.iter().filter_map(result_position);
    let result_count = results
        .filter(|(result_turn, _)| result_turn == turn)
        .count();
    !ends_with_text(steps) && result_count == message.tool_calls.len()
}

/// Whether the last reply has no calls, and no message follows it.
fn ends_with_text(steps: &[Entry]) -> bool {
    let after = steps.iter().rev().take_while(|step| !is_reply(step));
    let is_text = |step: &Entry| matches!(step, Entry::Replied { message, .. } if message.tool_calls.is_empty());
    steps
        .iter()
        .rfind(|step| is_reply(step))
        .is_some_and(is_text)
        && !after.into_iter().any(continues_text)
}

fn range_message(steps: &[Entry], last: u32) -> String {
    let last = last + u32::from(is_next_requested(steps));
    format!(
        "must be from 0 to {}, the last turn of the run",
        last.max(1)
    )
}

impl KeptSteps {
    /// The positions of the kept calls among all of them.
    pub fn call_order(&self) -> HashMap<&str, usize> {
        let calls = self.steps.iter().filter_map(|step| match step {
            Entry::Replied { message, .. } => Some(&message.tool_calls),
            _ => None,
        });
        let ids = calls.flatten().map(|call| call.id.as_str());
        ids.zip(0..).collect()
    }

    /// Gives these open calls, which continue, the arguments that a person approved them with. The other open calls need
    /// approval anew, so what was changed about them is dropped.
    pub fn apply_changed_arguments(&mut self, mut continued: Vec<&mut OpenCall>) {
        let open_calls = &self.open_calls;
        self.steps.retain(|step| {
            let Entry::CallDecided {
                call_id,
                arguments: Some(arguments),
                ..
            } = step
            else {
                return true;
            };
            match continued.iter_mut().find(|open| open.call.id == *call_id) {
                Some(open) => {
                    open.call.arguments = Arc::clone(arguments);
                    true
                }
                None => !open_calls.iter().any(|open| open.call.id == *call_id),
            }
        });
    }

    /// Applies the edits of the conversation.
    pub fn edit(&mut self, edit: &ForkEdit) -> Result<(), ForkError> {
        if let Some(message) = &edit.message {
            self.edit_prompt(|_, user_message| *user_message = message.clone());
        }
        if let Some(text) = &edit.system {
            self.edit_prompt(|system, _| system.clone_from(text));
        }
        if let Some(reply) = &edit.reply {
            self.replace_reply(reply);
        }
        for (call, text) in &edit.tool_results {
            self.replace_result(call, text)?;
        }
        Ok(())
    }

    /// Changes the last recorded prompt. Providers accept signed thinking only after the messages that it was written
    /// after.
    fn edit_prompt(&mut self, change: impl FnOnce(&mut String, &mut Content)) {
        let prompts = self.steps.iter_mut().rev();
        let mut prompts = prompts.filter_map(|step| match step {
            Entry::Prompted {
                system, message, ..
            } => Some((system, message)),
            _ => None,
        });
        if let Some((system, message)) = prompts.next() {
            change(system, message);
        }
        self.drop_thinking_after(0);
    }

    /// Replaces the last reply.
    fn replace_reply(&mut self, reply: &AssistantMessage) {
        let steps = std::mem::take(&mut self.steps);
        let mut steps = steps;
        if let Some(Entry::Replied { message, .. }) = steps.last_mut() {
            *message = reply.clone();
        }
        *self = kept(steps, &None);
    }

    fn replace_result(&mut self, id: &str, text: &str) -> Result<(), ForkError> {
        let replies = self.steps.iter().filter_map(|step| match step {
            Entry::Replied { turn, message, .. } => Some((*turn, &message.tool_calls)),
            _ => None,
        });
        let mut calls = replies.flat_map(|(turn, calls)| {
            (0_u32..)
                .zip(calls)
                .map(move |(position, call)| (turn, position, call))
        });
        let Some((turn, position, _)) = calls.find(|(_, _, call)| call.id == id) else {
            let reason = "is not the id of a call that the fork keeps; GET /runs/{id}/messages has the calls of a run";
            let key = id.replace('~', "~0").replace('/', "~1");
            return Err(ForkError::field(
                format!("/edit/tool_results/{key}"),
                reason,
            ));
        };
        self.steps
            .retain(|step| result_position(step) != Some((turn, position)));
        let reply = reply_position(&self.steps, turn).map_or(self.steps.len(), |at| at + 1);
        let result = Entry::CallCompleted {
            turn,
            position,
            tool: String::new(),
            result: ToolResult::text(id, text, false),
            duration_ms: 0,
            refused_by: Vec::new(),
        };
        self.steps.insert(reply, result);
        self.open_calls.retain(|open| open.call.id != id);
        self.recorded_calls.remove(id);
        self.drop_thinking_after(turn);
        Ok(())
    }

    fn drop_thinking_after(&mut self, after: u32) {
        for step in &mut self.steps {
            if let Entry::Replied { turn, message, .. } = step
                && *turn > after
            {
                let mut reply = [Message::Assistant(std::mem::take(message))];
                reasoning::strip_reasoning(&mut reply);
                let [Message::Assistant(stripped)] = reply else {
                    continue;
                };
                *message = stripped;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::value::RawValue;

    use std::sync::Arc;

    use super::{Cut, KeptSteps, cut};
    use crate::domain::event::Decision;
    use crate::domain::message::{AssistantMessage, ToolCall, ToolResult, empty_arguments};
    use crate::engine::fork::request::ForkEdit;
    use crate::record::entry::{Entry, ReplyReport};

    fn reply(turn: u32, calls: &[&str]) -> Entry {
        let call = |id: &&str| ToolCall {
            id: (*id).to_owned(),
            provider_id: String::new(),
            name: "t".to_owned(),
            arguments: empty_arguments(),
            invalid_arguments: None,
        };
        let message = AssistantMessage {
            content: format!("reply {turn}"),
            tool_calls: calls.iter().map(call).collect(),
            echo: None,
        };
        Entry::Replied {
            turn,
            message,
            report: ReplyReport::default(),
        }
    }

    fn result(turn: u32, position: u32, id: &str) -> Entry {
        Entry::CallCompleted {
            turn,
            position,
            tool: String::new(),
            duration_ms: 0,
            result: ToolResult::text(id, "x", false),
            refused_by: Vec::new(),
        }
    }

    /// Two turns with calls, the first with two, and a final text.
    fn steps() -> Vec<Entry> {
        let prompt = Entry::Prompted {
            system: String::new(),
            message: "go".into(),
            earlier: Vec::new(),
            compaction: None,
        };
        vec![
            prompt,
            reply(1, &["a", "b"]),
            result(1, 1, "b"),
            result(1, 0, "a"),
            Entry::Compacting,
            reply(2, &["c"]),
            result(2, 0, "c"),
            reply(3, &[]),
        ]
    }

    fn kept(at: &Cut) -> KeptSteps {
        cut(steps(), at).expect("in range")
    }

    fn open(kept: &KeptSteps) -> Vec<&str> {
        kept.open_calls
            .iter()
            .map(|it| it.call.id.as_str())
            .collect()
    }

    #[test]
    fn turns_before_the_cut_are_kept_with_their_results() {
        for (turn, steps, turns) in [(0, 1, 0), (1, 1, 0), (2, 4, 1), (3, 6, 2)] {
            let kept = kept(&Cut::BeforeTurn(turn));
            assert_eq!((kept.steps.len(), kept.turns), (steps, turns), "{turn}");
            assert!(kept.open_calls.is_empty() && !kept.is_final);
        }
        let error = cut(steps(), &Cut::BeforeTurn(4)).expect_err("a final text");
        assert_eq!(error, "must be from 0 to 3, the last turn of the run");
    }

    #[test]
    fn a_turn_that_is_requested_next_is_in_range() {
        let mut steps = steps();
        steps.truncate(7);
        assert!(cut(steps.clone(), &Cut::BeforeTurn(3)).is_ok());
        steps.truncate(6);
        assert!(
            cut(steps, &Cut::BeforeTurn(3)).is_err(),
            "a result is missing"
        );
    }

    #[test]
    fn the_calls_of_a_kept_reply_are_open() {
        assert_eq!(open(&kept(&Cut::AfterReply(1))), ["a", "b"]);
        assert!(kept(&Cut::AfterReply(3)).is_final);
        assert!(cut(steps(), &Cut::AfterReply(4)).is_err());
        let delegation = kept(&Cut::InCall("a".to_owned()));
        assert_eq!((open(&delegation), delegation.turns), (vec!["a"], 1));
        assert!(delegation.recorded_calls.contains("b"));
    }

    #[test]
    fn changed_arguments_are_kept_except_those_of_calls_that_need_approval_anew() {
        let changed = |id: &str| Entry::CallDecided {
            call_id: id.to_owned(),
            decision: Decision::Approved,
            arguments: RawValue::from_string(format!("[\"{id}\"]"))
                .ok()
                .map(Arc::from),
            reason: None,
            by: None,
        };
        let mut steps = vec![reply(1, &["a", "b", "c"]), result(1, 1, "b")];
        steps.extend(["a", "b", "c"].map(changed));
        for at in [Cut::InCall("a".to_owned()), Cut::AtEnd { is_failed: false }] {
            let mut kept = cut(steps.clone(), &at).expect("in range");
            let mut continued = kept.open_calls[0].clone();
            kept.apply_changed_arguments(vec![&mut continued]);
            assert_eq!(continued.call.arguments.get(), "[\"a\"]");
            let ids = kept.steps.iter().filter_map(|step| match step {
                Entry::CallDecided { call_id, .. } => Some(call_id.as_str()),
                _ => None,
            });
            assert_eq!(ids.collect::<Vec<_>>(), ["a", "b"], "{at:?}");
        }
    }

    #[test]
    fn a_text_that_a_run_failed_with_is_not_kept() {
        assert!(kept(&Cut::AtEnd { is_failed: false }).is_final);
        assert_eq!(kept(&Cut::AtEnd { is_failed: true }).turns, 2);
    }

    #[test]
    fn a_given_result_replaces_the_recorded_one_or_the_call() {
        let edit = |id: &str| ForkEdit {
            tool_results: [(id.to_owned(), "given".to_owned())].into(),
            ..ForkEdit::default()
        };
        let mut replaced = kept(&Cut::BeforeTurn(2));
        replaced.edit(&edit("a")).expect("a kept call");
        let given = |step: &&Entry| matches!(step, Entry::CallCompleted { result, .. } if result.content == "given");
        assert_eq!(replaced.steps.iter().filter(given).count(), 1);
        assert_eq!(replaced.steps.len(), 4);
        let mut open_call = kept(&Cut::AfterReply(2));
        open_call.edit(&edit("c")).expect("a kept call");
        assert!(open_call.open_calls.is_empty());
        assert!(kept(&Cut::BeforeTurn(2)).edit(&edit("c")).is_err());
    }
}
