//! Rate limits of providers: requests wait before they are sent, fairly and by priority; a refusal pauses all of them.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::{Value, json};

use crate::batches::{accepted, finished, lines, results, send_batch};
use crate::support::app::{TestApp, key, send};
use crate::support::events::{Event, count};
use crate::support::eventually;
use crate::support::gate::Gate;
use crate::support::provider::answer::{ScriptedAnswer, fails, raw, says};

/// Input tokens of each request in the stories about tokens.
const TOKENS: u64 = 1_000;

/// A service that limits input tokens: refills evenly, and holds as much as axed may use at once.
struct Limited {
    free: f64,
    per_minute: f64,
    at: Instant,
    refused: usize,
}

impl Limited {
    fn new(per_minute: u64) -> Arc<Mutex<Self>> {
        let per_minute = per_minute as f64;
        Arc::new(Mutex::new(Self {
            free: per_minute / 10.0,
            per_minute,
            at: Instant::now(),
            refused: 0,
        }))
    }

    fn answer(&mut self) -> ScriptedAnswer {
        let refilled = self.at.elapsed().as_secs_f64() * self.per_minute / 60.0;
        // Of those that may go at once, some may arrive seconds later.
        let most = self.per_minute / 10.0 + 10.0 * TOKENS as f64;
        (self.free, self.at) = ((self.free + refilled).min(most), Instant::now());
        if self.free < TOKENS as f64 {
            self.refused += 1;
            return fails(429, "too many tokens").header("retry-after", "1");
        }
        self.free -= TOKENS as f64;
        says("done").with_usage(TOKENS, 1)
    }
}

/// A text of so many tokens.
fn long_text(beginning: &str) -> String {
    format!("{beginning} {}", "x".repeat(4 * TOKENS as usize - 40))
}

fn delays(events: &[Event]) -> Vec<&Event> {
    let delays = events.iter().filter(|it| it.kind() == "turn.delayed");
    delays.collect()
}

/// What the requests began with, in their order.
fn sent(app: &TestApp, characters: usize) -> Vec<String> {
    let requests = app.provider.requests();
    let text = |text: &String| text.chars().take(characters).collect();
    requests
        .iter()
        .map(|seen| text(&seen.user_messages()[0]))
        .collect()
}

async fn metrics(app: &TestApp) -> String {
    app.get("/metrics").await.text
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_runs_share_a_limit_by_keys_and_none_is_refused() {
    let limits = format!("{HELD_LIMIT}input_tokens_per_minute = 300000");
    let keys = format!(
        "{}{}",
        key("ada", "scopes = [\"admin\"]"),
        key("bob", "scopes = [\"admin\"]")
    );
    let app = TestApp::setup()
        .config(&format!("{limits}\n{keys}"))
        .agent("holding", HOLDING)
        .agent("solo", "[params]\nmax_tokens = 1000")
        .spawn()
        .await;
    let service = Limited::new(300_000);
    let limited = Arc::clone(&service);
    let answer = move || limited.lock().expect("a service").answer();
    let gate = holding(&app);
    app.provider.always("solo", move |_| answer());
    let start = async |agent: &str, owner: &str, input: String| {
        let path = format!("/agents/{agent}/runs");
        let request = app
            .request(Method::POST, &path)
            .json(&json!({ "input": input }));
        let started = send(request.bearer_auth(owner)).await;
        assert_eq!(started.status, 202, "{}", started.text);
        started.json()["id"].as_str().expect("an id").to_owned()
    };
    let mut runs = vec![start("holding", "ada", "go".to_owned()).await];
    app.provider.wait_for_requests(1).await;
    for owner in ["ada"; 42].into_iter().chain(["bob"; 6]) {
        runs.push(start("solo", owner, long_text(owner)).await);
    }
    waiting(&app, 48, "ada").await;
    gate.open();
    for id in &runs {
        let ended = eventually("the end", async || {
            let path = format!("/runs/{id}?wait=180");
            let got = send(app.request(Method::GET, &path).bearer_auth("ada")).await;
            (!got.json()["finished_at"].is_null()).then_some(got)
        })
        .await;
        assert_eq!(ended.json()["status"], "completed", "{}", ended.text);
    }
    assert_eq!(service.lock().expect("a service").refused, 0);
    // Bob's were the last to come, and are among the 30 that may go at once. They overtake each other on their way.
    let sent = sent(&app, 3).split_off(1);
    let last_of_bob = sent.iter().rposition(|owner| owner == "bob");
    assert!(last_of_bob < Some(36), "{sent:?}");
    let page = send(app.request(Method::GET, "/metrics").bearer_auth("ada")).await;
    let labels = "{provider=\"anthropic\",model=\"solo\"";
    for line in [
        format!("axed_rate_limit_limit{labels},unit=\"input_tokens\"}} 300000\n"),
        format!("axed_rate_limit_used{labels},unit=\"input_tokens\"}} 48000\n"),
        format!("axed_rate_limit_waiting{labels}}} 0\n"),
    ] {
        assert!(page.text.contains(&line), "{line} in {}", page.text);
    }
}

#[tokio::test]
async fn a_refusal_pauses_every_run_and_uses_up_no_retry() {
    let no_retry = "[retry]\nmax_retries = 0";
    let app = TestApp::setup().agent("solo", no_retry).spawn().await;
    let times = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&times);
    app.provider.always("solo", move |_| {
        let mut seen = seen.lock().expect("times");
        seen.push(Instant::now());
        match seen.len() {
            1 => fails(429, "slow down").header("retry-after", "15"),
            _ => says("done"),
        }
    });
    let refused = app.start("solo", "first").await;
    app.events(&refused).await.until("retry.scheduled").await;
    let other = app.run("solo", "second").await;

    assert_eq!(other.output(), "done");
    let refused = refused.wait_for_end().await;
    assert_eq!(refused.output(), "done");
    for run in [&refused, &other] {
        let events = run.events().await;
        let delays = delays(&events);
        assert_eq!(delays.len(), 1, "{events:?}");
        assert_eq!(delays[0]["reason"], "rate_limit");
        assert_eq!(delays[0]["turn"], 1);
        assert!(delays[0]["until"].is_string(), "{events:?}");
    }
    let times = times.lock().expect("times");
    assert_eq!(times.len(), 3);
    assert!(times[1] - times[0] >= Duration::from_secs(15));
}

#[tokio::test]
async fn a_spent_quota_is_final_or_the_turn_of_a_fallback() {
    let app = TestApp::setup()
        .agent("alone", "model = \"openai/first\"")
        .agent(
            "both",
            "model = \"openai/first\"\nfallback_models = [\"openai/second\"]",
        )
        .spawn()
        .await;
    let error = json!({"message": "You exceeded your current quota", "type": "insufficient_quota",
        "code": "insufficient_quota"});
    let body = json!({ "error": error }).to_string();
    app.provider.always("first", move |_| {
        raw(429, "application/json", body.clone()).header("retry-after", "1")
    });
    app.provider.always("second", |_| says("done"));

    let alone = app.run("alone", "go").await;
    assert_eq!(alone.failure().0, "provider_rate_limit");
    assert_eq!(app.provider.requests().len(), 1);
    let both = app.run("both", "go").await;
    assert_eq!(both.output(), "done");
    assert_eq!(delays(&both.events().await).len(), 0);
    assert_eq!(app.provider.requests().len(), 3);
}

#[tokio::test]
async fn limits_are_learned_from_headers() {
    let app = TestApp::setup()
        .agent("claude", "")
        .agent("gpt", "model = \"openai/gpt\"")
        .spawn()
        .await;
    let anthropic = |name: &'static str, value: &'static str| (name, value);
    let headers = [
        anthropic("anthropic-ratelimit-requests-limit", "1"),
        anthropic("anthropic-ratelimit-requests-remaining", "0"),
        anthropic("anthropic-ratelimit-input-tokens-limit", "60000"),
        anthropic("anthropic-ratelimit-input-tokens-remaining", "59000"),
        anthropic("anthropic-ratelimit-output-tokens-limit", "8000"),
    ];
    app.provider.always("claude", move |_| {
        let headers = headers.into_iter();
        headers.fold(says("done"), |answer, (name, value)| {
            answer.header(name, value)
        })
    });
    app.provider.always("gpt", |_| {
        says("done")
            .header("x-ratelimit-limit-requests", "500")
            .header("x-ratelimit-limit-tokens", "30000")
            .header("x-ratelimit-remaining-tokens", "29000")
            .header("x-ratelimit-reset-tokens", "2s")
    });
    app.run("claude", "go").await;
    app.run("gpt", "go").await;
    let page = metrics(&app).await;
    for (model, unit, limit) in [
        ("provider=\"anthropic\",model=\"claude\"", "requests", 1),
        (
            "provider=\"anthropic\",model=\"claude\"",
            "input_tokens",
            60_000,
        ),
        (
            "provider=\"anthropic\",model=\"claude\"",
            "output_tokens",
            8_000,
        ),
        ("provider=\"openai\",model=\"gpt\"", "requests", 500),
        ("provider=\"openai\",model=\"gpt\"", "tokens", 30_000),
    ] {
        let line = format!("axed_rate_limit_limit{{{model},unit=\"{unit}\"}} {limit}\n");
        assert!(page.contains(&line), "{line} in {page}");
    }
    // Nothing remained of one request a minute.
    let delayed = app.start("claude", "again").await;
    app.events(&delayed).await.until("turn.delayed").await;
    assert_eq!(
        delays(&app.run("gpt", "again").await.events().await).len(),
        0
    );
    let system = app.get("/ui/system").await.text;
    assert!(
        system.contains("Rate limits") && system.contains("of 60"),
        "{system}"
    );
}

/// An agent of the model whose request uses up every limit of output until the gate opens; then it gives all of that back.
pub fn holding(app: &TestApp) -> Gate {
    let gate = Gate::closed();
    let answer = says("done").with_usage(0, 1).after_gate(&gate);
    app.provider.will("solo", [answer]);
    gate
}

/// 50 minutes of this limit, which is less than runs have.
pub const HOLDING: &str = "model = \"anthropic/solo\"\n[params]\nmax_tokens = 30000000";
pub const HELD_LIMIT: &str =
    "[providers.anthropic.limits.solo]\noutput_tokens_per_minute = 600000\n";

/// Until so many requests wait for the limit.
async fn waiting(app: &TestApp, count: usize, bearer: &str) {
    let line =
        format!("axed_rate_limit_waiting{{provider=\"anthropic\",model=\"solo\"}} {count}\n");
    eventually("requests that wait", async || {
        let request = app.request(Method::GET, "/metrics").bearer_auth(bearer);
        send(request).await.text.contains(&line).then_some(())
    })
    .await;
}

#[tokio::test]
async fn interactive_requests_come_before_those_in_the_background() {
    // One request at a time has the output that it reserves.
    let one = "[params]\nmax_tokens = 60000";
    let app = TestApp::setup()
        .config(HELD_LIMIT)
        .agent("holding", HOLDING)
        .agent("solo", one)
        .agent(
            "slow",
            &format!("model = \"anthropic/solo\"\npriority = \"background\"\n{one}"),
        )
        .spawn()
        .await;
    let gate = holding(&app);
    app.provider.always("solo", |_| says("done"));
    let mut runs = vec![app.start("holding", "first").await];
    app.provider.wait_for_requests(1).await;
    for input in ["back 1", "back 2"] {
        runs.push(app.start("slow", input).await);
    }
    let body = json!({"input": "back 3", "priority": "background"});
    runs.push(app.start_with("solo", body).await);
    for input in ["fore 1", "fore 2", "fore 3"] {
        runs.push(app.start("solo", input).await);
    }
    waiting(&app, 6, "").await;
    gate.open();
    for run in runs {
        assert_eq!(run.wait_for_end().await.output(), "done");
    }
    let order = sent(&app, 6).split_off(1);
    let last_fore = order.iter().rposition(|it| it.starts_with("fore"));
    assert_eq!(last_fore, Some(2), "{order:?}");
}

#[tokio::test]
async fn runs_of_a_batch_are_in_the_background() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.always("solo", |_| says("done"));
    let id = accepted(&send_batch(&app, "k", &lines(1)).await);
    finished(&app, &id).await;
    let run = &results(&app, &id).await[0]["run"];
    let run = app.find(run["id"].as_str().expect("an id")).await;
    let events = run.events().await;
    assert_eq!(events[0]["request"]["priority"], "background");
    let run = app.run("solo", "go").await;
    assert_eq!(run.events().await[0]["request"], Value::Null);
}

#[tokio::test]
async fn a_wait_that_is_longer_than_the_run_is_a_fallbacks_turn() {
    let limits = "[providers.anthropic.limits.\"solo*\"]\ninput_tokens_per_minute = 100";
    let app = TestApp::setup()
        .config(limits)
        .agent("solo", "")
        .agent(
            "both",
            "model = \"anthropic/solo-2\"\nfallback_models = [\"openai/second\"]",
        )
        .spawn()
        .await;
    for model in ["solo", "solo-2", "second"] {
        // More than an hour's limit.
        app.provider
            .always(model, |_| says("done").with_usage(10_000, 1));
    }
    assert_eq!(app.run("solo", "go").await.output(), "done");
    let refused = app.run("solo", "go").await;
    let (code, message) = refused.failure();
    assert_eq!(code, "provider_rate_limit");
    assert!(
        message.contains("longer than the run has left"),
        "{message}"
    );
    // Both models are limited together.
    let both = app.run("both", "go").await;
    assert_eq!(both.output(), "done");
    assert_eq!(both["model"], "second");
    assert_eq!(app.provider.requests().len(), 2);
}

#[tokio::test]
async fn a_waiting_run_can_be_cancelled() {
    let limits = "[providers.anthropic.limits.solo]\nrequests_per_minute = 1";
    let app = TestApp::setup()
        .config(limits)
        .agent("solo", "")
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    app.run("solo", "go").await;
    let waiting = app.start("solo", "go").await;
    app.events(&waiting).await.until("turn.delayed").await;
    let line = "axed_rate_limit_waiting{provider=\"anthropic\",model=\"solo\"}";
    assert!(metrics(&app).await.contains(&format!("{line} 1\n")));
    assert_eq!(waiting.cancel("enough").await.status(), "cancelled");
    eventually("nothing waits", async || {
        let page = metrics(&app).await;
        page.contains(&format!("{line} 0\n")).then_some(())
    })
    .await;
    assert_eq!(app.provider.requests().len(), 1);
}

/// 429s without any number make axed find a rate that the service takes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_that_says_nothing_is_slowed_down_for() {
    let app = TestApp::setup()
        .agent("solo", "[retry]\nmax_retries = 1\ninitial_delay_ms = 1")
        .spawn()
        .await;
    // Ten at once, and ten a second.
    let service = Arc::new(Mutex::new((10.0, Instant::now())));
    app.provider.always("solo", move |_| {
        let mut state = service.lock().expect("a service");
        let (free, at) = *state;
        let free = f64::min(free + 10.0 * at.elapsed().as_secs_f64(), 10.0);
        *state = (free - 1.0, Instant::now());
        match free >= 1.0 {
            true => says("done"),
            false => {
                *state = (free, Instant::now());
                fails(429, "slow down")
            }
        }
    });
    let mut runs = Vec::new();
    for number in 0..30 {
        runs.push(app.start("solo", &number.to_string()).await);
    }
    for run in runs {
        assert_eq!(run.wait_for_end().await.output(), "done");
    }
}

#[tokio::test]
async fn waits_that_are_short_have_no_event() {
    let limits = "[providers.anthropic.limits.solo]\nrequests_per_minute = 200";
    let app = TestApp::setup()
        .config(limits)
        .agent("solo", "")
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    for _ in 0..22 {
        let run = app.run("solo", "go").await;
        assert_eq!(count(&run.events().await, "turn.delayed"), 0);
    }
}
