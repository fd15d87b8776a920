//! Rate limits of providers: requests wait before they are sent, fairly and by priority; a refusal pauses all of them.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::{Value, json};

use crate::batches::{accepted, finished, lines, results, send_batch};
use crate::support::app::{TestApp, key, send};
use crate::support::events::{Event, count};
use crate::support::eventually;
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
        // Requests overtake each other on their way.
        let most = self.per_minute / 10.0 + 2.0 * TOKENS as f64;
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
    let limits = "[providers.anthropic.limits.solo]\ninput_tokens_per_minute = 300000";
    let keys = format!(
        "{}{}",
        key("ada", "scopes = [\"admin\"]"),
        key("bob", "scopes = [\"admin\"]")
    );
    let app = TestApp::setup()
        .config(&format!("{limits}\n{keys}"))
        .agent("solo", "")
        .spawn()
        .await;
    let service = Limited::new(300_000);
    let limited = Arc::clone(&service);
    let answer = move || limited.lock().expect("a service").answer();
    app.provider.always("solo", move |_| answer());
    let mut runs = Vec::new();
    for owner in ["ada"; 42].into_iter().chain(["bob"; 6]) {
        let body = json!({"input": long_text(owner)});
        let request = app.request(Method::POST, "/agents/solo/runs").json(&body);
        let started = send(request.bearer_auth(owner)).await;
        assert_eq!(started.status, 202, "{}", started.text);
        runs.push(started.json()["id"].as_str().expect("an id").to_owned());
    }
    for id in &runs {
        let path = format!("/runs/{id}?wait=60");
        let ended = send(app.request(Method::GET, &path).bearer_auth("ada")).await;
        assert_eq!(ended.json()["status"], "completed", "{}", ended.text);
    }
    assert_eq!(service.lock().expect("a service").refused, 0);
    let sent = sent(&app, 3);
    let of_bob = sent.iter().position(|owner| owner == "bob").expect("his");
    let turns = &sent[of_bob..of_bob + 8];
    assert_eq!(
        turns.iter().filter(|it| *it == "bob").count(),
        4,
        "{sent:?}"
    );
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
    let refusal = || fails(429, "slow down").header("retry-after", "2");
    app.provider.will("solo", [refusal()]);
    app.provider.always("solo", |_| says("done"));
    let refused = app.start("solo", "first").await;
    app.events(&refused).await.until("retry.scheduled").await;
    let start = Instant::now();
    let other = app.run("solo", "second").await;

    assert_eq!(other.output(), "done");
    assert!(start.elapsed() > Duration::from_millis(1500));
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
    assert_eq!(app.provider.requests().len(), 3);
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
        anthropic("anthropic-ratelimit-requests-limit", "40"),
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
        ("provider=\"anthropic\",model=\"claude\"", "requests", 40),
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
    // Nothing remained of 40 requests a minute.
    let delayed = app.run("claude", "again").await;
    assert_eq!(delayed.output(), "done");
    assert_eq!(delays(&delayed.events().await).len(), 1);
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

#[tokio::test]
async fn interactive_requests_come_before_those_in_the_background() {
    let limits = "[providers.anthropic.limits.\"*\"]\nrequests_per_minute = 120";
    let app = TestApp::setup()
        .config(limits)
        .agent("solo", "")
        .agent(
            "slow",
            "model = \"anthropic/solo\"\npriority = \"background\"",
        )
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    // What may be used at once.
    for _ in 0..12 {
        app.run("solo", "first").await;
    }
    let mut runs = Vec::new();
    for input in ["back 1", "back 2"] {
        runs.push(app.start("slow", input).await);
    }
    let body = json!({"input": "back 3", "priority": "background"});
    runs.push(app.start_with("solo", body).await);
    for input in ["fore 1", "fore 2", "fore 3"] {
        runs.push(app.start("solo", input).await);
    }
    for run in runs {
        assert_eq!(run.wait_for_end().await.output(), "done");
    }
    let order = sent(&app, 6).split_off(12);
    let last_fore = order.iter().rposition(|it| it.starts_with("fore"));
    // One of them may have been sent before the others came.
    assert!(last_fore <= Some(3), "{order:?}");
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
    let limits = "[providers.anthropic.limits.\"solo*\"]\nrequests_per_minute = 1";
    let app = TestApp::setup()
        .config(limits)
        .agent("solo", "timeout = 20")
        .agent(
            "both",
            "model = \"anthropic/solo-2\"\ntimeout = 20\nfallback_models = [\"openai/second\"]",
        )
        .spawn()
        .await;
    for model in ["solo", "solo-2", "second"] {
        app.provider.always(model, |_| says("done"));
    }
    assert_eq!(app.run("solo", "go").await.output(), "done");
    let start = Instant::now();
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
    assert!(start.elapsed() < Duration::from_secs(10));
    assert_eq!(app.provider.requests().len(), 2);
}

#[tokio::test]
async fn a_waiting_run_can_be_cancelled() {
    let limits = "[providers.anthropic.limits.solo]\nrequests_per_minute = 2";
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
