//! Caching: what loops, trees and later runs pay for at full price, counted from the bodies as sent by services that cache up to
//! marks; and prefixes that stay the same from turn to turn on every wire.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::eventually;
use crate::support::gate::Gate;
use crate::support::provider::answer::{ScriptedAnswer, calls, delegates, says};
use crate::support::provider::recorded_request::{RecordedRequest, Wire};

/// A service's cache, which knows a prompt only up to its marks. Tokens are counted at four bytes each.
#[derive(Default)]
struct PrefixCache {
    kept: HashSet<String>,
    counted: Counted,
}

/// Bytes of input.
#[derive(Clone, Copy, Default)]
struct Counted {
    input: usize,
    fresh: usize,
    read: usize,
    written: usize,
}

impl Counted {
    /// What is read from the cache.
    fn cached_share(&self) -> f64 {
        self.read as f64 / self.input as f64
    }

    /// What the input costs, against its price without a cache: reading costs a tenth, and writing a quarter more.
    fn price_share(&self) -> f64 {
        (self.fresh as f64 + self.read as f64 * 0.1 + self.written as f64 * 1.25)
            / self.input as f64
    }
}

impl PrefixCache {
    /// Counts a request's input: how many tokens are fresh, read from the cache and written to it.
    fn count(&mut self, seen: &RecordedRequest) -> (u64, u64, u64) {
        let (mut prefix, mut read, mut marks) = (String::new(), 0, Vec::new());
        let blocks = blocks(seen);
        let last = blocks.len().saturating_sub(1);
        for (at, block) in blocks.into_iter().enumerate() {
            let (is_marked, text) = unmarked(block);
            prefix.push_str(&text);
            // OpenAI marks the end of each request itself, and compares at every item.
            let is_openai = seen.wire == Wire::Responses;
            if is_marked || (is_openai && at == last) {
                marks.push(prefix.clone());
            }
            if (is_marked || is_openai) && self.kept.contains(&prefix) {
                read = prefix.len();
            }
        }
        assert!(marks.len() <= 4, "{} marks", marks.len());
        let written = marks.last().map_or(0, String::len).saturating_sub(read);
        self.kept.extend(marks);
        let fresh = prefix.len() - read - written;
        let counted = &mut self.counted;
        counted.input += prefix.len();
        counted.fresh += fresh;
        counted.read += read;
        counted.written += written;
        let tokens = |bytes: usize| (bytes / 4) as u64;
        (tokens(fresh), tokens(read), tokens(written))
    }

    fn take(&mut self) -> Counted {
        std::mem::take(&mut self.counted)
    }
}

/// The blocks of a request in the order in which services cache them: tools, system, messages.
fn blocks(seen: &RecordedRequest) -> Vec<Value> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let mut blocks = list(&seen.body["tools"]);
    blocks.extend(list(&seen.body["system"]));
    blocks.extend(seen.body.get("instructions").cloned());
    for message in seen.messages() {
        let parts = list(&message["content"]);
        if parts.is_empty() {
            blocks.push(message.clone());
        }
        for mut block in parts {
            block["role"] = message["role"].clone();
            blocks.push(block);
        }
    }
    blocks
}

/// Whether a block is marked, and its text without the mark.
fn unmarked(mut block: Value) -> (bool, String) {
    let marks = block.as_object_mut().map(|block| {
        let explicit = block.remove("prompt_cache_breakpoint");
        block.remove("cache_control").or(explicit)
    });
    (marks.flatten().is_some(), block.to_string())
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
        let (fresh, read, written) = cache.count(seen);
        loops(seen)
            .with_usage(fresh, 20)
            .with_cached_tokens(read, written)
    });

    let run = app.run("reader", "Read the book").await;

    assert_eq!(run["turns"], 10, "{}", run.output());
    let cache = cache.lock().expect("a cache");
    let counted = cache.counted;
    let fresh = counted.fresh as f64 / counted.input as f64;
    (fresh, run["tree"].clone())
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

/// The services of the table, with a model of each.
const SERVICES: [(&str, &str, &str); 3] = [
    ("Anthropic", "anthropic", "claude-sonnet-5-5"),
    ("OpenAI", "responses", "gpt-6-sol"),
    ("OpenRouter", "openrouter", "anthropic/claude-sonnet-5-5"),
];
/// The children of a tree.
const CHILDREN: usize = 6;

/// A prompt of about 6,000 tokens.
fn long_prompt() -> String {
    let line = "Read with care, and answer only what the page in front of you says.";
    format!("system_prompt = \"{}\"\n", [line; 350].join(" "))
}

/// A daemon whose requests for the model are counted, and the count.
async fn counted_app(provider: &str, model: &str) -> (TestApp, Arc<Mutex<PrefixCache>>) {
    let reader = format!("model = \"{provider}/{model}\"\n{}{READER}", long_prompt());
    let planner = "model = \"anthropic/planner\"\nsub_agents = [\"reader\"]";
    let app = TestApp::setup()
        .config("[providers.openrouter]\nbase_url = \"{provider}\"\napi_key = \"k\"")
        .agent("reader", &reader)
        .agent("planner", planner)
        .file("book.txt", "A short book.\n")
        .spawn()
        .await;
    let cache = Arc::new(Mutex::new(PrefixCache::default()));
    let counting = Arc::clone(&cache);
    app.provider.always(model, move |seen| {
        counting.lock().expect("a cache").count(seen);
        loops(seen)
    });
    (app, cache)
}

fn take(cache: &Mutex<PrefixCache>) -> Counted {
    cache.lock().expect("a cache").take()
}

/// The first run of an agent, and three later ones.
async fn loop_and_later_runs(provider: &str, model: &str) -> (Counted, Counted) {
    let (app, cache) = counted_app(provider, model).await;
    app.run("reader", "Read the book").await;
    let first = take(&cache);
    for at in 0..3 {
        let run = app.run("reader", &format!("Read page {at}")).await;
        assert_eq!(run["turns"], 10, "{run:?}");
    }
    (first, take(&cache))
}

/// Children that a planner calls one after the other.
async fn tree_in_a_row(provider: &str, model: &str) -> Counted {
    let (app, cache) = counted_app(provider, model).await;
    let counting = Arc::clone(&cache);
    app.provider.always(model, move |seen| {
        counting.lock().expect("a cache").count(seen);
        says("done")
    });
    app.provider.always("planner", |seen| match seen.turn() {
        turn if turn <= CHILDREN => delegates([("reader", &*format!("page {turn}"))]),
        _ => says("done"),
    });
    assert_eq!(app.run("planner", "go").await.output(), "done");
    take(&cache)
}

/// Children that a planner calls at the same time. Until the service begins to reply to the first one, the cache knows nothing.
/// `None` if the machine was too slow for that.
async fn tree_at_once(provider: &str, model: &str) -> Option<Counted> {
    let (app, cache) = counted_app(provider, model).await;
    let gate = Gate::closed();
    let (counting, first_reply) = (Arc::clone(&cache), gate.clone());
    app.provider.always(model, move |seen| {
        let mut cache = counting.lock().expect("a cache");
        let known = cache.kept.clone();
        cache.count(seen);
        if !first_reply.is_open() && seen.turn() == 1 && !known.is_empty() {
            // The first request is still read: nothing was in the cache.
            let counted = &mut cache.counted;
            counted.written += std::mem::take(&mut counted.read);
        }
        says("done").after_gate(&first_reply)
    });
    let pages = ["page 1", "page 2", "page 3", "page 4", "page 5", "page 6"];
    app.provider.will(
        "planner",
        [delegates(pages.map(|page| ("reader", page))), says("done")],
    );
    let start = Instant::now();
    let run = app.start("planner", "go").await;
    let is_child_turn = |event: &&crate::support::events::Event| {
        event.kind() == "turn.started" && event["depth"] == 1
    };
    let mut events = app.events(&run).await;
    events
        .until_matches(|seen| seen.iter().filter(is_child_turn).count() == CHILDREN)
        .await;
    app.provider.wait_for_request(model, 1).await;
    gate.open();
    let took = start.elapsed();
    assert_eq!(run.wait_for_end().await.output(), "done");
    assert_eq!(app.provider.requests_for(model).len(), CHILDREN);
    // The first one goes ahead for five seconds at most.
    (took < Duration::from_secs(4)).then(|| take(&cache))
}

/// The table of what caching saves.
#[tokio::test]
async fn loops_trees_and_later_runs_read_their_prompts_from_the_cache() {
    println!("service     loop of 10 turns  three later runs  tree in a row  tree at once");
    for (service, provider, model) in SERVICES {
        let (first, later) = loop_and_later_runs(provider, model).await;
        let in_a_row = tree_in_a_row(provider, model).await;
        let at_once = eventually("a tree", async || tree_at_once(provider, model).await).await;
        let percent = |share: f64| format!("{:.1} %", share * 100.0);
        println!(
            "{service:<12}{:<18}{:<18}{:<15}{}",
            percent(first.cached_share()),
            percent(later.cached_share()),
            percent(in_a_row.price_share()),
            percent(at_once.price_share()),
        );
        assert!(first.cached_share() > 0.85, "{service}");
        assert!(later.cached_share() > 0.94, "{service}");
        assert!(in_a_row.price_share() < 0.31, "{service}");
        assert!(at_once.price_share() < 0.31, "{service}");
    }
}

/// The share of the input that is read from the cache, after the first run.
async fn later_share(app: &TestApp, runs: usize, start: impl AsyncFn(usize)) -> f64 {
    let cache = Arc::new(Mutex::new(PrefixCache::default()));
    let counting = Arc::clone(&cache);
    app.provider.always("claude", move |seen| {
        counting.lock().expect("a cache").count(seen);
        says("fine")
    });
    start(0).await;
    take(&cache);
    for at in 1..runs {
        start(at).await;
    }
    take(&cache).cached_share()
}

#[tokio::test]
async fn conversations_and_kept_prompts_are_cached_without_tools_too() {
    let talker = format!("model = \"anthropic/claude\"\n{}", long_prompt());
    let app = TestApp::setup()
        .agent("talker", &talker)
        .agent("kept", &format!("cache = \"1h\"\n{talker}"))
        .agent("off", &format!("cache = \"off\"\n{talker}"))
        .spawn()
        .await;
    let in_session = |agent: &'static str| {
        let app = &app;
        async move |at: usize| {
            let body = json!({"input": format!("question {at}"), "session": "ada"});
            assert_eq!(app.run_with(agent, body).await.output(), "fine");
        }
    };
    let over_v1 = async |at: usize| {
        let question = |at| json!({"role": "user", "content": format!("question {at}")});
        let mut messages = vec![question(0)];
        for earlier in 1..=at {
            messages.push(json!({"role": "assistant", "content": "fine"}));
            messages.push(question(earlier));
        }
        let body = json!({"model": "talker", "messages": messages});
        let reply = app.post("/v1/chat/completions", &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
    };
    let plain = |agent: &'static str| {
        let app = &app;
        async move |at: usize| {
            let run = app.run(agent, &format!("question {at}")).await;
            assert_eq!(run.output(), "fine");
        }
    };
    assert!(later_share(&app, 4, in_session("talker")).await > 0.94);
    assert!(later_share(&app, 4, over_v1).await > 0.94);
    assert!(later_share(&app, 4, plain("kept")).await > 0.94);
    // Nothing reads the prompt of a run of one turn, and writing costs more.
    assert_eq!(later_share(&app, 2, plain("talker")).await, 0.0);
    assert_eq!(later_share(&app, 2, in_session("off")).await, 0.0);
}

#[tokio::test]
async fn children_with_short_prompts_and_without_a_cache_start_together() {
    for (provider, prompt) in [("anthropic", String::new()), ("ollama", long_prompt())] {
        let reader = format!("model = \"{provider}/reader\"\n{prompt}");
        let app = TestApp::setup()
            .agent("reader", &reader)
            .agent("planner", "sub_agents = [\"reader\"]")
            .spawn()
            .await;
        let gate = Gate::closed();
        let reply = gate.clone();
        let answer = move |_: &RecordedRequest| says("done").after_gate(&reply);
        app.provider.always("reader", answer);
        let pages = ["one", "two", "three"].map(|page| ("reader", page));
        app.provider
            .will("planner", [delegates(pages), says("done")]);
        let run = app.start("planner", "go").await;
        app.provider.wait_for_concurrency("reader", 3).await;
        gate.open();
        assert_eq!(run.wait_for_end().await.output(), "done");
    }
}
