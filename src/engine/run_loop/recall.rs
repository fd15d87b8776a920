//! Searches the recorded conversation of a run and the earlier runs of its session.

use std::collections::{HashMap, HashSet};

use crate::domain::message::{Message, truncate_to_bytes};
use crate::domain::run::{Run, RunId, Status};
use crate::engine::context::Engine;
use crate::engine::history::RecordedConversation;
use crate::engine::history::tree_reads;
use crate::record::entry::{self, Entry};
use crate::store::StoreError;
use crate::store::runs::SessionQuery;
use crate::tools::recall::NAME;

/// The most bytes of text that one call searches, newest first.
const MAX_SEARCHED: usize = 16 << 20;
const MAX_RUNS: usize = 200;
const EXCERPT_BYTES: usize = 600;
const MAX_WORDS: usize = 16;

/// A recorded text and its source.
#[derive(Debug)]
struct Passage {
    source: String,
    text: String,
}

impl Passage {
    fn new(run_label: &str, turn: u32, what: &str, text: String) -> Self {
        let source = format!("{run_label}turn {turn}, {what}");
        Self { source, text }
    }
}

/// The passages of the run and its session that match the query best, as text for the model. A reply may make many such calls:
/// few read at the same time, because each holds the texts of a session in memory.
pub async fn search(
    engine: &Engine,
    id: RunId,
    query: &str,
    limit: usize,
) -> Result<String, StoreError> {
    let store = engine.journal.store();
    let mut next = store.run(id).await?;
    let owner = next.as_ref().and_then(|run| run.owner.clone());
    let permit = tree_reads::acquire(owner.as_deref()).await;
    let mut passages = Vec::new();
    let mut bytes = 0;
    for runs_back in 0..=MAX_RUNS {
        let Some(run) = next.take() else { break };
        let steps = entry::steps(store.entries(run.id).await?);
        let own_steps = if run.session.is_some() {
            without_earlier(steps)
        } else {
            steps
        };
        let run_label = match runs_back {
            0 => String::new(),
            _ => format!("in the run of {}, ", run.created_at),
        };
        for passage in passages_from(
            RecordedConversation::from_steps(own_steps).messages,
            &run_label,
        ) {
            bytes += passage.text.len();
            passages.push(passage);
        }
        if bytes >= MAX_SEARCHED {
            break;
        }
        next = previous_run(engine, &run).await?;
    }
    let query = query.to_owned();
    let search = move || {
        // The work keeps the permit, because it ends a little after a dropped call.
        let _permit = permit;
        render_matches(&passages, &query, limit)
    };
    let result = tokio::task::spawn_blocking(search).await;
    result.map_err(|_| StoreError::Closed)
}

/// The completed run of the session before this one.
async fn previous_run(engine: &Engine, run: &Run) -> Result<Option<Run>, StoreError> {
    let Some(name) = &run.session else {
        return Ok(None);
    };
    let query = SessionQuery {
        owner: run.owner.clone(),
        name: name.clone(),
        agent: Some(run.agent.clone()),
        status: Some(Status::Completed),
        before: Some(run.id),
        limit: 1,
        cut_texts: false,
        skip_damaged: false,
    };
    Ok(engine.journal.store().session_runs(query).await?.pop())
}

/// Drops the messages of earlier runs from the prompt: those runs are read themselves.
fn without_earlier(mut steps: Vec<Entry>) -> Vec<Entry> {
    for step in &mut steps {
        if let Entry::Prompted { earlier, .. } = step {
            earlier.clear();
        }
    }
    steps
}

/// The searchable texts of messages, newest first. Calls of `recall` and their results are left out.
fn passages_from(messages: Vec<Message>, run_label: &str) -> Vec<Passage> {
    let mut passages = Vec::new();
    let mut names: HashMap<String, String> = HashMap::new();
    let mut turn = 0;
    for message in messages {
        match message {
            Message::User { content } => {
                let text = content.to_plain_text().into_owned();
                passages.push(Passage::new(run_label, turn, "a user's message", text));
            }
            Message::Assistant(reply) => {
                turn += 1;
                if !reply.content.is_empty() {
                    passages.push(Passage::new(run_label, turn, "a reply", reply.content));
                }
                for call in reply.tool_calls {
                    if call.name != NAME {
                        let what = format!("a call of {}", truncate_to_bytes(&call.name, 200));
                        let arguments = call.sent_arguments().to_owned();
                        passages.push(Passage::new(run_label, turn, &what, arguments));
                    }
                    names.insert(call.id, call.name);
                }
            }
            Message::Tool { tool_results } => {
                for result in tool_results {
                    let name = names.get(&result.call_id).map_or("a tool", String::as_str);
                    if name != NAME {
                        let what = format!("the result of {}", truncate_to_bytes(name, 200));
                        passages.push(Passage::new(run_label, turn, &what, result.content));
                    }
                }
            }
        }
    }
    passages.reverse();
    passages
}

fn render_matches(passages: &[Passage], query: &str, limit: usize) -> String {
    let query = query.to_lowercase();
    let mut seen = HashSet::new();
    let words: Vec<&str> = query
        .split_whitespace()
        .filter(|word| seen.insert(*word))
        .take(MAX_WORDS)
        .collect();
    let mut matches: Vec<(usize, String)> = Vec::new();
    for passage in passages {
        let (rank, excerpt) = best_excerpt(&passage.text, &words);
        if rank > 0 {
            matches.push((rank, format!("{}:\n{excerpt}", passage.source)));
        }
    }
    if matches.is_empty() {
        return "Nothing was found: no recorded text has any of these words.".to_owned();
    }
    // Stable: among equals the newest stays first.
    matches.sort_by_key(|(rank, _)| std::cmp::Reverse(*rank));
    let total = matches.len();
    let shown = matches.iter().take(limit).enumerate();
    let mut text: Vec<String> = shown
        .map(|(at, (_, excerpt))| format!("{}. {excerpt}", at + 1))
        .collect();
    if total > limit {
        text.push(format!(
            "{} more were found; use more specific words.",
            total - limit
        ));
    }
    text.join("\n\n")
}

/// The part of a text that contains most of the words, and its rank.
fn best_excerpt(text: &str, words: &[&str]) -> (usize, String) {
    let (mut best, mut excerpt, mut offset) = (0, "", 0);
    loop {
        let is_boundary = |at: &usize| text.is_char_boundary(*at);
        let start = (offset..=text.len()).find(is_boundary);
        let part = truncate_to_bytes(&text[start.unwrap_or(text.len())..], EXCERPT_BYTES);
        let lower = part.to_lowercase();
        let rank = words.iter().map(|word| rank(&lower, word)).sum();
        if rank > best {
            (best, excerpt) = (rank, part);
        }
        offset += EXCERPT_BYTES / 2;
        if offset + EXCERPT_BYTES / 2 >= text.len() {
            return (best, excerpt.trim().to_owned());
        }
    }
}

/// 2 if the text contains the word as a whole word, 1 if only within another word, else 0.
fn rank(text: &str, word: &str) -> usize {
    let is_whole = |(at, _): (usize, &str)| {
        let before = text[..at].chars().next_back();
        let after = text[at + word.len()..].chars().next();
        !before.is_some_and(char::is_alphanumeric) && !after.is_some_and(char::is_alphanumeric)
    };
    let mut occurrences = text.match_indices(word).peekable();
    match occurrences.peek() {
        None => 0,
        Some(_) => 1 + usize::from(occurrences.any(is_whole)),
    }
}

#[cfg(test)]
mod tests {
    use super::{Passage, best_excerpt, passages_from, render_matches};
    use crate::domain::message::{
        AssistantMessage, Message, ToolCall, ToolResult, empty_arguments,
    };

    fn turn(tool: &str, result: &str) -> [Message; 2] {
        let call = ToolCall {
            id: "1".to_owned(),
            provider_id: String::new(),
            name: tool.to_owned(),
            arguments: empty_arguments(),
            invalid_arguments: None,
        };
        let reply = AssistantMessage {
            tool_calls: vec![call],
            ..AssistantMessage::default()
        };
        let tool_results = vec![ToolResult::text("1", result, false)];
        [Message::Assistant(reply), Message::Tool { tool_results }]
    }

    #[test]
    fn the_passage_with_most_words_comes_first() {
        let passage = |source: &str, text: &str| Passage {
            source: source.to_owned(),
            text: text.to_owned(),
        };
        let passages = [
            passage("c", "The key is in the drawer"),
            passage("b", "Nothing here"),
            passage("a", "The RED key opens the door"),
        ];
        let text = render_matches(&passages, "red key red", 5);
        assert_eq!(
            text,
            "1. a:\nThe RED key opens the door\n\n2. c:\nThe key is in the drawer"
        );
        let text = render_matches(&passages, "key", 1);
        assert!(
            text.starts_with("1. c:")
                && text.ends_with("1 more were found; use more specific words.")
        );
        assert!(render_matches(&passages, "window", 5).starts_with("Nothing was found"));
    }

    #[test]
    fn recall_results_are_not_searched() {
        let task = Message::user("Go");
        let messages = [
            vec![task],
            turn("grep", "gold").to_vec(),
            turn("recall", "gold").to_vec(),
        ];
        let passages = passages_from(messages.concat(), "");
        let sources: Vec<&str> = passages.iter().map(|it| it.source.as_str()).collect();
        assert_eq!(
            sources,
            [
                "turn 1, the result of grep",
                "turn 1, a call of grep",
                "turn 0, a user's message"
            ]
        );
    }

    #[test]
    fn the_excerpt_has_the_whole_words() {
        let text = format!("617 {} needle 17 {}", "ä".repeat(900), "ö".repeat(900));
        let (rank, part) = best_excerpt(&text, &["needle", "17"]);
        assert_eq!(rank, 4);
        assert!(part.contains("needle 17"), "{part}");
        assert!(part.len() <= 600, "{}", part.len());
        assert_eq!(best_excerpt("the 617", &["17"]), (1, "the 617".to_owned()));
        assert_eq!(best_excerpt("short", &["long"]).0, 0);
    }
}
