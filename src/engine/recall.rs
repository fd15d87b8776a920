//! Searches what is recorded of a run's conversation and of its session, in plain words. Knows no loop.

use std::collections::{HashMap, HashSet};

use crate::domain::message::{Message, beginning};
use crate::domain::run::{Run, RunId, Status};
use crate::engine::history::Recorded;
use crate::engine::parts::Engine;
use crate::store::{SessionQuery, Step, StoreError};
use crate::tools::recall::NAME;

/// The most bytes of texts that one call searches; the newest count.
const MAX_SEARCHED: usize = 16 << 20;
/// The most earlier runs of a session that one call reads.
const MAX_RUNS: usize = 200;
/// Bytes of a passage that are shown.
const EXCERPT: usize = 600;
/// The most words of a query.
const MAX_WORDS: usize = 16;

/// A text that was recorded, and where.
#[derive(Debug)]
struct Passage {
    place: String,
    text: String,
}

impl Passage {
    fn new(when: &str, turn: u32, what: &str, text: String) -> Self {
        let place = format!("{when}turn {turn}, {what}");
        Self { place, text }
    }
}

/// The passages of the run and its session in which most of the words occur.
pub async fn search(
    engine: &Engine,
    id: RunId,
    query: &str,
    limit: usize,
) -> Result<String, StoreError> {
    let store = engine.journal.store();
    let mut passages = Vec::new();
    let mut bytes = 0;
    let mut next = store.run(id).await?;
    for earlier in 0..=MAX_RUNS {
        let Some(run) = next.take() else { break };
        let steps = store.steps(run.id).await?;
        let own = if run.session.is_some() {
            own_only(steps)
        } else {
            steps
        };
        let when = match earlier {
            0 => String::new(),
            _ => format!("in the run of {}, ", run.created_at),
        };
        for passage in of_messages(Recorded::of(own).messages, &when) {
            bytes += passage.text.len();
            passages.push(passage);
        }
        if bytes >= MAX_SEARCHED {
            break;
        }
        next = before(engine, &run).await?;
    }
    let query = query.to_owned();
    let found = tokio::task::spawn_blocking(move || found(&passages, &query, limit)).await;
    found.map_err(|_| StoreError::Closed)
}

/// The completed run of the session before this one.
async fn before(engine: &Engine, run: &Run) -> Result<Option<Run>, StoreError> {
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
    };
    Ok(engine.journal.store().session(query).await?.pop())
}

/// Without what came before the run: those runs are read themselves.
fn own_only(mut steps: Vec<Step>) -> Vec<Step> {
    for step in &mut steps {
        if let Step::Prompt { earlier, .. } = step {
            earlier.clear();
        }
    }
    steps
}

/// What can be found in messages, the newest first. What `recall` itself found is not found again.
fn of_messages(messages: Vec<Message>, when: &str) -> Vec<Passage> {
    let mut passages = Vec::new();
    let mut names: HashMap<String, String> = HashMap::new();
    let mut turn = 0;
    for message in messages {
        match message {
            Message::User { content } => {
                let text = content.plain().into_owned();
                passages.push(Passage::new(when, turn, "a user's message", text));
            }
            Message::Assistant(reply) => {
                turn += 1;
                if !reply.content.is_empty() {
                    passages.push(Passage::new(when, turn, "a reply", reply.content));
                }
                for call in reply.tool_calls {
                    if call.name != NAME {
                        let what = format!("a call of {}", beginning(&call.name, 200));
                        let arguments = call.arguments.get().to_owned();
                        passages.push(Passage::new(when, turn, &what, arguments));
                    }
                    names.insert(call.id, call.name);
                }
            }
            Message::Tool { tool_results } => {
                for result in tool_results {
                    let name = names.get(&result.call_id).map_or("a tool", String::as_str);
                    if name != NAME {
                        let what = format!("the result of {}", beginning(name, 200));
                        passages.push(Passage::new(when, turn, &what, result.content));
                    }
                }
            }
        }
    }
    passages.reverse();
    passages
}

/// The passages in which most of the words occur, as text for the model.
fn found(passages: &[Passage], query: &str, limit: usize) -> String {
    let query = query.to_lowercase();
    let mut seen = HashSet::new();
    let words: Vec<&str> = query
        .split_whitespace()
        .filter(|word| seen.insert(*word))
        .take(MAX_WORDS)
        .collect();
    let mut hits: Vec<(usize, String)> = Vec::new();
    for passage in passages {
        let (rank, excerpt) = best_excerpt(&passage.text, &words);
        if rank > 0 {
            hits.push((rank, format!("{}:\n{excerpt}", passage.place)));
        }
    }
    if hits.is_empty() {
        return "Nothing was found: no recorded text has any of these words.".to_owned();
    }
    // Stable: among equals the newest stays first.
    hits.sort_by_key(|(rank, _)| std::cmp::Reverse(*rank));
    let all = hits.len();
    let shown = hits.iter().take(limit).enumerate();
    let mut text: Vec<String> = shown
        .map(|(at, (_, excerpt))| format!("{}. {excerpt}", at + 1))
        .collect();
    if all > limit {
        text.push(format!(
            "{} more were found; use more specific words.",
            all - limit
        ));
    }
    text.join("\n\n")
}

/// The part of a text in which most of the words occur, and how many: a whole word counts twice.
fn best_excerpt(text: &str, words: &[&str]) -> (usize, String) {
    let (mut best, mut shown, mut from) = (0, "", 0);
    loop {
        let is_boundary = |at: &usize| text.is_char_boundary(*at);
        let start = (from..=text.len()).find(is_boundary);
        let part = beginning(&text[start.unwrap_or(text.len())..], EXCERPT);
        let lower = part.to_lowercase();
        let rank = words.iter().map(|word| rank(&lower, word)).sum();
        if rank > best {
            (best, shown) = (rank, part);
        }
        from += EXCERPT / 2;
        if from + EXCERPT / 2 >= text.len() {
            return (best, shown.trim().to_owned());
        }
    }
}

/// 2 if the text has the word, 1 if it has it within another word, else 0.
fn rank(text: &str, word: &str) -> usize {
    let is_whole = |(at, _): (usize, &str)| {
        let before = text[..at].chars().next_back();
        let after = text[at + word.len()..].chars().next();
        !before.is_some_and(char::is_alphanumeric) && !after.is_some_and(char::is_alphanumeric)
    };
    let mut places = text.match_indices(word).peekable();
    match places.peek() {
        None => 0,
        Some(_) => 1 + usize::from(places.any(is_whole)),
    }
}

#[cfg(test)]
mod tests {
    use super::{Passage, best_excerpt, found, of_messages};
    use crate::domain::message::{AssistantMessage, Message, ToolCall, ToolResult, no_arguments};

    fn turn(tool: &str, result: &str) -> [Message; 2] {
        let call = ToolCall {
            id: "1".to_owned(),
            provider_id: String::new(),
            name: tool.to_owned(),
            arguments: no_arguments(),
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
        let passage = |place: &str, text: &str| Passage {
            place: place.to_owned(),
            text: text.to_owned(),
        };
        let passages = [
            passage("c", "The key is in the drawer"),
            passage("b", "Nothing here"),
            passage("a", "The RED key opens the door"),
        ];
        let text = found(&passages, "red key red", 5);
        assert_eq!(
            text,
            "1. a:\nThe RED key opens the door\n\n2. c:\nThe key is in the drawer"
        );
        let text = found(&passages, "key", 1);
        assert!(
            text.starts_with("1. c:")
                && text.ends_with("1 more were found; use more specific words.")
        );
        assert!(found(&passages, "window", 5).starts_with("Nothing was found"));
    }

    #[test]
    fn what_was_recalled_is_not_recalled_again() {
        let task = Message::user("Go");
        let messages = [
            vec![task],
            turn("grep", "gold").to_vec(),
            turn("recall", "gold").to_vec(),
        ];
        let passages = of_messages(messages.concat(), "");
        let places: Vec<&str> = passages.iter().map(|it| it.place.as_str()).collect();
        assert_eq!(
            places,
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
