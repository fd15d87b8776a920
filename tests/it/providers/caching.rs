//! Caching: what a loop pays for at full price, counted by a service that caches by prefix as Anthropic's does; and prefixes
//! that stay the same from turn to turn on every wire.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::provider::answer::{ScriptedAnswer, calls, says};
use crate::support::provider::recorded_request::RecordedRequest;

/// A service's cache. Tokens are counted at four bytes each.
#[derive(Default)]
struct PrefixCache {
    kept: HashSet<String>,
    input: usize,
    fresh: usize,
}

impl PrefixCache {
    /// Counts a request's input: how much of it is read from the cache and written to it.
    fn count(&mut self, body: &Value) -> (u64, u64, u64) {
        let (mut prefix, mut read, mut written) = (String::new(), 0, 0);
        let mut marks = Vec::new();
        for block in blocks(body) {
            let (marked, text) = unmarked(block);
            prefix.push_str(&text);
            if marked {
                marks.push(prefix.clone());
            }
        }
        assert!(marks.len() <= 4, "{} marks", marks.len());
        for mark in marks {
            if self.kept.contains(&mark) {
                read = mark.len();
            } else {
                written = mark.len();
                self.kept.insert(mark);
            }
        }
        let written = written.saturating_sub(read);
        let fresh = prefix.len() - read - written;
        self.input += prefix.len();
        self.fresh += fresh;
        let tokens = |bytes: usize| (bytes / 4) as u64;
        (tokens(fresh), tokens(read), tokens(written))
    }
}

/// The blocks of a request in the order in which the service caches them: tools, system, messages.
fn blocks(body: &Value) -> Vec<Value> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let mut blocks = list(&body["tools"]);
    blocks.extend(list(&body["system"]));
    for message in list(&body["messages"]) {
        for mut block in list(&message["content"]) {
            block["role"] = message["role"].clone();
            blocks.push(block);
        }
    }
    blocks
}

/// Whether a block is marked, and its text without the mark.
fn unmarked(mut block: Value) -> (bool, String) {
    let mark = block
        .as_object_mut()
        .and_then(|block| block.remove("cache_control"));
    (mark.is_some(), block.to_string())
}

/// Nine turns that read a file, then a text.
fn loops(seen: &RecordedRequest) -> ScriptedAnswer {
    match seen.turn() {
        turn @ 1..=9 => calls([(
            "read_file",
            json!({"path": "book.txt", "offset": turn * 40, "limit": 40}),
        )]),
        _ => says("done"),
    }
}

const READER: &str = "tools = [\"read_file\", \"grep\", \"find_path\", \"list_directory\"]";

async fn ten_turns(toml: &str) -> (f64, Value) {
    let page = "A line of a long book, of which there are many more.\n".repeat(600);
    let app = TestApp::setup()
        .agent("reader", &format!("{toml}\n{READER}"))
        .file("book.txt", &page)
        .config("[providers.anthropic.models.reader]\ninput = 3\noutput = 15\ncache_read = 0.3\ncache_write = 3.75\ncache_write_1h = 6\n")
        .spawn()
        .await;
    let cache = Arc::new(Mutex::new(PrefixCache::default()));
    let counting = Arc::clone(&cache);
    app.provider.always("reader", move |seen| {
        let mut cache = counting.lock().expect("a cache");
        let (fresh, read, written) = cache.count(&seen.body);
        loops(seen)
            .with_usage(fresh, 20)
            .with_cached_tokens(read, written)
    });

    let run = app.run("reader", "Read the book").await;

    assert_eq!(run["turns"], 10, "{}", run.output());
    let cache = cache.lock().expect("a cache");
    (cache.fresh as f64 / cache.input as f64, run["tree"].clone())
}

#[tokio::test]
async fn a_loop_of_ten_turns_reads_most_tokens_from_the_cache() {
    let (share, tree) = ten_turns("").await;
    let (without, plain) = ten_turns("cache = \"off\"").await;
    let (hour_share, hour) = ten_turns("cache = \"1h\"").await;

    println!(
        "ten turns: {:.1} % of the input at the full price, {} against {} USD without caching",
        share * 100.0,
        tree["cost_usd"],
        plain["cost_usd"]
    );
    assert!(share <= 0.15, "{share}");
    assert!(hour_share <= 0.15, "{hour_share}");
    assert_eq!(without, 1.0);
    assert!(tree["cache_read_tokens"].as_u64() > tree["cache_write_tokens"].as_u64());
    assert_eq!(plain["cache_read_tokens"], 0);
    let cost = |tree: &Value| tree["cost_usd"].as_f64().expect("a cost");
    assert!(cost(&tree) < cost(&plain) / 2.0, "{tree} {plain}");
    assert!(cost(&tree) < cost(&hour) && cost(&hour) < cost(&plain));
}

#[tokio::test]
async fn prefixes_are_equal_from_turn_to_turn() {
    let app = TestApp::setup()
        .agent("claude", READER)
        .agent("gpt", &format!("model = \"openai/gpt\"\n{READER}"))
        .agent("llama", &format!("model = \"ollama/llama\"\n{READER}"))
        .file("book.txt", "A short book.\n")
        .spawn()
        .await;
    for agent in ["claude", "gpt", "llama"] {
        app.provider.always(agent, loops);
        let run = app.run(agent, "Read the book").await;
        assert_eq!(run.output(), "done", "{agent}");
        let seen = app.provider.requests_for(agent);
        assert_eq!(seen.len(), 10);
        for pair in seen.windows(2) {
            let (before, after) = (prefix(&pair[0].body), prefix(&pair[1].body));
            assert_eq!(before.0, after.0, "{agent}: all but the messages");
            assert!(after.1.len() > before.1.len());
            assert_eq!(before.1[..], after.1[..before.1.len()], "{agent}");
        }
    }
}

/// A request without its messages, and its messages, marks left out.
fn prefix(body: &Value) -> (String, Vec<String>) {
    fn without_marks(value: &mut Value) {
        match value {
            Value::Object(fields) => {
                fields.remove("cache_control");
                fields.values_mut().for_each(without_marks);
            }
            Value::Array(items) => items.iter_mut().for_each(without_marks),
            _ => {}
        }
    }
    let mut body = body.clone();
    without_marks(&mut body);
    let messages = body["messages"].take();
    let messages = messages.as_array().cloned().unwrap_or_default();
    (
        body.to_string(),
        messages.iter().map(Value::to_string).collect(),
    )
}
