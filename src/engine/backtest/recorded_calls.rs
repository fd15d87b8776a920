//! The calls of a recorded run with their results. Pure.

use std::collections::{BTreeMap, HashMap};

use jiff::Timestamp;
use serde_json::Value;

use crate::domain::attachment::Digest;
use crate::domain::event::Decision;
use crate::domain::ignore::Ignore;
use crate::domain::message::{ToolCall, ToolResult};
use crate::engine::state::evaluated_tree::PlayedCall;
use crate::record::entry::{Entry, RecordedEntry};
use crate::tools::{call_agent, deferred, subagent};

/// A call that has a result.
pub struct RecordedCall {
    /// When the reply with the call was recorded.
    pub time: Timestamp,
    pub call: ToolCall,
    pub result: ToolResult,
    /// What a person decided, and whether the arguments were changed.
    decision: Option<(Decision, bool)>,
}

impl RecordedCall {
    /// What a repetition of the call gets; `None` if it is performed.
    pub fn into_played(self) -> Option<PlayedCall> {
        match (is_delegation(&self.call), self.decision) {
            (true, None) => None,
            (true, Some((Decision::Approved, false))) => Some(PlayedCall::ApprovedDelegation),
            // No run of the recorded tree has the arguments of the model.
            (true, Some(_)) | (false, _) => Some(PlayedCall::Result(self.result)),
        }
    }

    pub fn bytes(&self) -> usize {
        let files = self.result.attachments.iter();
        let files: usize = files
            .map(|it| it.name.as_ref().map_or(0, String::len) + 128)
            .sum();
        self.result.content.len() + files + 256
    }
}

/// The calls in the order of their replies.
pub fn of_run(entries: Vec<RecordedEntry>) -> Vec<RecordedCall> {
    let mut replies: HashMap<u32, (Timestamp, Vec<ToolCall>)> = HashMap::new();
    let mut results: BTreeMap<(u32, u32), ToolResult> = BTreeMap::new();
    let mut decisions = HashMap::new();
    for RecordedEntry { entry, time, .. } in entries {
        match entry {
            Entry::Replied { turn, message, .. } if !message.tool_calls.is_empty() => {
                replies.insert(turn, (time, message.tool_calls));
            }
            // A later result of the same call replaces an earlier one, as in the conversation.
            Entry::CallCompleted {
                turn,
                position,
                result,
                ..
            } => drop(results.insert((turn, position), result)),
            Entry::CallDecided {
                call_id,
                decision,
                arguments,
                ..
            } => drop(decisions.insert(call_id, (decision, arguments.is_some()))),
            _ => {}
        }
    }
    let calls = results
        .into_iter()
        .filter_map(|((turn, position), result)| {
            let (time, calls) = replies.get(&turn)?;
            let call = calls.get(position as usize)?;
            Some(RecordedCall {
                time: *time,
                decision: decisions.get(&call.id).copied(),
                call: call.clone(),
                result,
            })
        });
    calls.collect()
}

pub fn is_delegation(call: &ToolCall) -> bool {
    [call_agent::NAME, subagent::NAME].contains(&call.name.as_str())
}

/// The same for calls of the same tool with the same arguments, except for what is ignored.
pub fn key(call: &ToolCall, ignore: &Ignore) -> Digest {
    let inner = deferred::inner_call(call);
    let (tool, arguments) = match &inner {
        Some((tool, arguments)) => (tool.as_str(), arguments.get()),
        None => (call.name.as_str(), call.sent_arguments()),
    };
    let canonical = match serde_json::from_str::<Value>(arguments) {
        Ok(mut arguments) => {
            arguments.sort_all_objects();
            arguments.to_string()
        }
        Err(_) => arguments.to_owned(),
    };
    let text = format!("{tool}\n{}", ignore.normalize(&canonical));
    Digest::compute(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::value::RawValue;

    use super::key;
    use crate::domain::ignore::Ignore;
    use crate::domain::message::ToolCall;

    fn call(name: &str, arguments: &str) -> ToolCall {
        let arguments = RawValue::from_string(arguments.to_owned()).expect("JSON");
        ToolCall {
            id: "c".to_owned(),
            provider_id: "p".to_owned(),
            name: name.to_owned(),
            arguments: Arc::from(arguments),
            invalid_arguments: None,
        }
    }

    #[test]
    fn a_call_is_the_same_whatever_the_order_of_its_arguments() {
        let ignore = Ignore::new(&[r"at \d+".to_owned()]).expect("a pattern");
        let key = |name: &str, arguments: &str| key(&call(name, arguments), &ignore);
        let same = r#"{"a": {"x": 1, "y": [2]}, "b": "at 9"}"#;
        assert_eq!(
            key("t", same),
            key("t", r#"{"b":"at 17","a":{"y":[2],"x":1}}"#)
        );
        assert_ne!(key("t", same), key("u", same));
        assert_ne!(
            key("t", same),
            key("t", r#"{"a": {"x": 1, "y": [3]}, "b": "at 9"}"#)
        );
        let deferred = r#"{"name": "s__t", "arguments": {"b": 1, "a": 2}}"#;
        assert_eq!(key("tool_call", deferred), key("s__t", r#"{"a":2,"b":1}"#));
    }
}
