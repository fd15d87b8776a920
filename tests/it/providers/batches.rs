//! `service = "batch"`: each turn is answered by a batch of the provider, which the run waits for with its time standing
//! still, over restarts too.

use serde_json::{Value, json};

use crate::support::app::{Setup, TestApp};
use crate::support::events::count;
use crate::support::eventually;
use crate::support::gate::Gate;
use crate::support::provider::answer::{ScriptedAnswer, calls, delegates, fails, hangs, raw, says};
use crate::support::run::Run;

const CONFIG: &str = r#"
[providers.claude]
kind = "anthropic"
api_key = "key-of-claude"
base_url = "{provider}"
services = ["batch"]
batch_poll = 0.02
max_concurrent = 1
[providers.gpt]
kind = "openai"
api_key = "key-of-gpt"
base_url = "{provider}"
services = ["batch"]
batch_poll = 0.02
max_concurrent = 1
[providers.new]
kind = "openai"
api = "responses"
api_key = "key-of-new"
base_url = "{provider}"
services = ["batch"]
batch_poll = 0.02
max_concurrent = 1
[prices."claude/m"]
input = 1
output = 2
[prices."gpt/m"]
input = 1
output = 2
[prices."new/m"]
input = 1
output = 2
batch = 0.25
"#;

/// The providers, with the share of the price that their batches cost.
const WIRES: [(&str, f64); 3] = [("claude", 0.5), ("gpt", 0.5), ("new", 0.25)];

fn setup() -> Setup {
    setup_with(CONFIG)
}

fn setup_with(config: &str) -> Setup {
    WIRES.iter().fold(TestApp::setup().config(config), |setup, (name, _)| {
        let agent = format!("model = \"{name}/m\"\nservice = \"batch\"\ntools = [\"grep\"]\n[retry]\ninitial_delay_ms = 1");
        setup.agent(name, &agent)
    })
}

fn priced(answer: ScriptedAnswer) -> ScriptedAnswer {
    answer.with_usage(100, 50)
}

async fn waits<'a>(app: &'a TestApp, run: &Run<'_>) -> Run<'a> {
    let path = format!("/runs/{}", run.id());
    let got = app
        .get_until(&path, |got| got.json()["status"] == "waiting")
        .await;
    assert_eq!(got.json()["waiting_for"], "batch", "{}", got.text);
    Run::new(app, got.json())
}

#[tokio::test]
async fn two_turns_are_two_batches_at_batch_prices() {
    for (agent, share) in WIRES {
        let app = setup().spawn().await;
        app.provider.will(
            "m",
            [
                priced(calls([("grep", json!({"pattern": "x"}))])),
                // The tier that a reply reports does not decide the cost of a batch.
                priced(says("done")).with_tier("default"),
            ],
        );
        let run = app
            .run_with(agent, json!({"input": "go", "stream": true}))
            .await;
        assert_eq!(run.output(), "done");
        assert_eq!(run["waiting_for"], Value::Null);
        assert_eq!(
            run["tree"]["cost_usd"]
                .as_f64()
                .map(|usd| (usd * 1e6).round()),
            Some(400.0 * share)
        );
        assert_eq!(
            (run.usage(), &run["tree"]["complete"]),
            ((200, 100, 1), &json!(true))
        );
        let seen = app.provider.requests();
        assert_eq!(seen.len(), 2);
        assert!(
            seen.iter()
                .all(|seen| !seen.wants_stream()
                    && seen.api_key() == Some(&format!("key-of-{agent}")))
        );
        assert_eq!(seen[1].tool_results().len(), 1, "{:?}", seen[1]);
        assert_eq!(app.provider.batches.created_and_cancelled().0.len(), 2);
        for (number, seen) in (1..).zip(&seen) {
            let turn = run.get(&format!("/turns/{number}")).await.json();
            assert_eq!(turn["request"]["body"], seen.body, "{agent} {turn}");
        }
        let events = run.events().await;
        assert_eq!(count(&events, "batch.submitted"), 2);
        assert_eq!(count(&events, "model.warning"), 0);
    }
}

#[tokio::test]
async fn a_run_in_a_batch_uses_no_time_permit_or_request_slot() {
    let app = setup()
        .config("[runs]\nmax_running = 1")
        .agent("parent", "sub_agents = [\"claude\"]")
        .agent("slow", "")
        .spawn()
        .await;
    let gate = Gate::closed();
    app.provider.will(
        "m",
        [
            says("first").after_gate(&gate),
            says("second").after_gate(&gate),
        ],
    );
    app.provider.will("slow", [hangs()]);
    app.provider
        .will("parent", [delegates([("claude", "x")]), says("all done")]);
    let first = app
        .start_with("claude", json!({"input": "go", "timeout": 20}))
        .await;
    waits(&app, &first).await;
    // A slot is free for another one, whose child is in a batch of the same provider.
    let parent = app.start("parent", "go").await;
    let path = format!("/runs/{}", parent.id());
    let got = app
        .get_until(&path, |got| got.json()["status"] == "waiting")
        .await;
    assert_eq!(got.json()["waiting_for"], "batch");
    assert_eq!(app.provider.batches.created_and_cancelled().0.len(), 2);
    // Longer than its timeout.
    let slow = app.start_with("slow", json!({"timeout": 21})).await;
    assert_eq!(slow.wait_for_end().await.failure().0, "timeout");
    gate.open();
    assert_eq!(first.wait_for_end().await.output(), "first");
    assert_eq!(parent.wait_for_end().await.output(), "all done");
}

/// The budget of a parent, which the request of one of its children reserves.
const SMALL_BUDGET: &str = "sub_agents = [\"claude\"]\n[budget]\nmax_tokens = 3000";

async fn waits_with_three_children<'a>(
    app: &'a TestApp,
    timeout: u64,
    batch_gate: &Gate,
) -> Run<'a> {
    let tasks = [("claude", "x"), ("claude", "y"), ("claude", "z")];
    app.provider.will(
        "parent",
        [priced(delegates(tasks)), priced(says("all done"))],
    );
    let gate = batch_gate.clone();
    app.provider
        .always("m", move |_| priced(says("done")).after_gate(&gate));
    let parent = app.start_with("parent", json!({"timeout": timeout})).await;
    let parent = waits(app, &parent).await;
    for child in parent.children().await {
        assert_eq!(child["waiting_for"], "batch", "{child:?}");
    }
    assert_eq!(app.provider.batches.created_and_cancelled().0.len(), 1);
    parent
}

#[tokio::test]
async fn a_run_whose_budget_a_batch_has_reserved_uses_no_time() {
    let app = setup().agent("parent", SMALL_BUDGET).spawn().await;
    let gate = Gate::closed();
    let parent = waits_with_three_children(&app, 600, &gate).await;
    // The parent, the child in the batch, and those that wait for what it has reserved.
    let paused = "SELECT count(*) FROM runs WHERE waiting_since IS NOT NULL";
    assert_eq!(app.database().number(paused), Some(4));
    gate.open();
    assert_eq!(parent.wait_for_end().await.output(), "all done");
    assert_eq!(app.provider.batches.created_and_cancelled().0.len(), 3);
}

#[tokio::test]
async fn runs_whose_budget_a_batch_has_reserved_continue_after_a_restart() {
    let mut app = setup().agent("parent", SMALL_BUDGET).spawn().await;
    let gate = Gate::closed();
    let parent = waits_with_three_children(&app, 600, &gate).await;
    let id = parent.id().to_owned();
    app.crash_and_restart().await;
    gate.open();
    let parent = app.find(&id).await.wait_for_end().await;
    assert_eq!(parent.output(), "all done");
    assert_eq!(
        app.provider.batches.created_and_cancelled().0.len(),
        3,
        "each is paid once"
    );
    assert_eq!(
        parent["tree"]["complete"], true,
        "the others had sent nothing"
    );
}

#[tokio::test]
async fn a_paused_run_leaves_a_freed_budget_to_others() {
    let app = setup().agent("parent", SMALL_BUDGET).spawn().await;
    let gate = Gate::closed();
    let parent = waits_with_three_children(&app, 600, &gate).await;
    let mut without_batch = Vec::new();
    for child in parent.children().await {
        if count(&child.events().await, "batch.submitted") == 0 {
            without_batch.push(child.id().to_owned());
        }
    }
    let path = format!("/runs/{}", without_batch[0]);
    let paused = app.post(&format!("{path}/pause"), &json!({})).await;
    assert_eq!(paused.status, 202, "{}", paused.text);
    gate.open();
    app.get_until(&path, |got| got.json()["waiting_for"] == "resume")
        .await;
    let other = app.find(&without_batch[1]).await.wait_for_end().await;
    assert_eq!(other.output(), "done");
    assert_eq!(app.provider.batches.created_and_cancelled().0.len(), 2);
    let resumed = app.post(&format!("{path}/resume"), &json!({})).await;
    assert_eq!(resumed.status, 202, "{}", resumed.text);
    assert_eq!(parent.wait_for_end().await.output(), "all done");
}

/// A batch whose reply is rejected, and costs tokens.
fn empty() -> ScriptedAnswer {
    let usage = json!({"input_tokens": 700, "output_tokens": 300});
    let reply = json!({"type": "message", "content": [], "usage": usage});
    raw(200, "application/json", reply.to_string())
}

#[tokio::test]
async fn a_failed_batch_is_charged_once_over_restarts() {
    // Killed before the next batch: the failed one is read again.
    let patient = "model = \"claude/m\"\nservice = \"batch\"\ntimeout = 5000000\n\
                   [retry]\ninitial_delay_ms = 4294967295\nmax_delay_ms = 4294967295";
    let mut app = setup()
        .server("max_timeout = 5000000")
        .agent("patient", patient)
        .spawn()
        .await;
    app.provider.will("m", [empty()]);
    let id = app.start("patient", "go").await.id().to_owned();
    for retries in 1..4 {
        let mut events = app.events(&app.find(&id).await).await;
        events
            .until_matches(|events| count(events, "retry.scheduled") == retries)
            .await;
        if retries < 3 {
            app.crash_and_restart().await;
        }
    }
    app.post(&format!("/runs/{id}/cancel"), &json!({})).await;
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.usage(), (700, 300, 0));

    // Killed afterwards: nobody reads it again.
    let gate = Gate::closed();
    let next = priced(says("done")).after_gate(&gate);
    app.provider.will("m", [empty(), next]);
    let id = app.start("claude", "go").await.id().to_owned();
    app.get_until(&format!("/runs/{id}"), |got| {
        got.json()["input_tokens"] == 700
    })
    .await;
    app.crash_and_restart().await;
    gate.open();
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.usage(), (800, 350, 0));
    assert_eq!(app.provider.batches.created_and_cancelled().0.len(), 3);
}

#[tokio::test]
async fn a_batch_continues_after_a_restart() {
    for (agent, share) in WIRES {
        for is_crash in [true, false] {
            let mut app = setup().spawn().await;
            let gate = Gate::closed();
            app.provider
                .will("m", [priced(says("done")).after_gate(&gate)]);
            let id = app.start(agent, "go").await.id().to_owned();
            waits(&app, &app.find(&id).await).await;
            match is_crash {
                true => app.crash_and_restart().await,
                false => app.restart().await,
            }
            // The next process looks at the same batch.
            let looks = app.provider.batch_polls();
            app.provider.wait_for_batch_polls(looks + 1).await;
            waits(&app, &app.find(&id).await).await;
            gate.open();
            let run = app.find(&id).await.wait_for_end().await;
            assert_eq!(run.output(), "done");
            assert_eq!(app.provider.requests().len(), 1, "paid once");
            assert_eq!(run["tree"]["complete"], true);
            assert_eq!(
                run["tree"]["cost_usd"]
                    .as_f64()
                    .map(|usd| (usd * 1e6).round()),
                Some(200.0 * share)
            );
        }
    }
}

#[tokio::test]
async fn an_unrecorded_batch_is_found_by_its_metadata() {
    for (agent, batches) in [("gpt", 1), ("new", 1), ("claude", 2)] {
        let mut app = setup().spawn().await;
        let answering = Gate::closed();
        // The service has the batch, and its answer is on the way.
        app.provider
            .will("m", [says("first").pausing_at(&answering), says("second")]);
        let id = app.start(agent, "go").await.id().to_owned();
        app.provider.wait_for_batches(1).await;
        app.crash_and_restart().await;
        let run = app.find(&id).await.wait_for_end().await;
        assert_eq!(
            app.provider.batches.created_and_cancelled().0.len(),
            batches,
            "{agent}"
        );
        assert_eq!(run.output(), if batches == 1 { "first" } else { "second" });
        // Anthropic's batches have no names: nobody can be sure that nothing else was paid for.
        assert_eq!(run["tree"]["complete"], batches == 1, "{agent}");
    }
}

/// Waits until so many batches were made, and all of them cancelled: runs wait for that for a short time only.
async fn are_cancelled(app: &TestApp, count: usize) {
    eventually("cancelled batches", async || {
        let (made, cancelled) = app.provider.batches.created_and_cancelled();
        (cancelled.len() >= count).then(|| assert_eq!((made.len(), &cancelled), (count, &made)))
    })
    .await;
}

#[tokio::test]
async fn a_cancelled_run_cancels_its_batch() {
    for (agent, _) in WIRES {
        let mut app = setup().spawn().await;
        app.provider
            .always("m", |_| says("never").after_gate(&Gate::closed()));
        let run = app.start(agent, "go").await;
        waits(&app, &run).await;
        let run = run.cancel("no more").await;
        assert_eq!(run.status(), "cancelled");
        assert_eq!(run["tree"]["complete"], false);
        are_cancelled(&app, 1).await;
        // Also if that was on the record only when the next process came.
        let id = app.start(agent, "go").await.id().to_owned();
        waits(&app, &app.find(&id).await).await;
        app.crash_and_restart().await;
        assert_eq!(
            app.find(&id).await.cancel("no more").await.status(),
            "cancelled"
        );
        are_cancelled(&app, 2).await;
    }
}

#[tokio::test]
async fn a_batch_that_is_made_while_its_run_is_cancelled_is_cancelled() {
    for (agent, _) in WIRES {
        let app = setup().spawn().await;
        let answering = Gate::closed();
        let answer = says("never").after_gate(&Gate::closed());
        app.provider.will("m", [answer.pausing_at(&answering)]);
        let run = app.start(agent, "go").await;
        app.provider.wait_for_batches(1).await;
        let path = format!("/runs/{}/cancel", run.id());
        assert_eq!(app.post(&path, &json!({})).await.status, 202);
        answering.open();
        assert_eq!(run.wait_for_end().await.status(), "cancelled");
        are_cancelled(&app, 1).await;
    }
}

#[tokio::test]
async fn a_run_that_is_cancelled_before_its_batch_is_sent_costs_nothing() {
    for (agent, _) in WIRES {
        let app = setup().spawn().await;
        let answering = Gate::closed();
        app.provider
            .will("m", [says("done").pausing_at(&answering)]);
        let first = app.start(agent, "go").await;
        app.provider.wait_for_batches(1).await;
        // The first one has the only request slot.
        let second = app.start(agent, "go").await;
        app.events(&second).await.until("turn.started").await;
        let second = second.cancel("no more").await;
        assert_eq!(second.status(), "cancelled");
        assert_eq!(second["tree"]["complete"], true, "{agent}");
        answering.open();
        assert_eq!(first.wait_for_end().await.output(), "done");
        assert_eq!(app.provider.batches.created_and_cancelled().0.len(), 1);
    }
}

#[tokio::test]
async fn an_unrecorded_batch_of_a_cancelled_run_is_found_and_cancelled() {
    // Anthropic's batches have no names.
    for agent in ["gpt", "new"] {
        let mut app = setup().spawn().await;
        let answer = says("never").after_gate(&Gate::closed());
        app.provider.will("m", [answer.pausing_at(&Gate::closed())]);
        let id = app.start(agent, "go").await.id().to_owned();
        app.provider.wait_for_batches(1).await;
        let path = format!("/runs/{id}/cancel");
        assert_eq!(app.post(&path, &json!({})).await.status, 202);
        app.crash_and_restart().await;
        let run = app.find(&id).await.wait_for_end().await;
        assert_eq!(run.status(), "cancelled");
        assert_eq!(run["tree"]["complete"], false);
        are_cancelled(&app, 1).await;
    }
}

#[tokio::test]
async fn errors_of_batch_items_are_handled_like_errors_of_requests() {
    for (agent, _) in WIRES {
        let redact = "[data]\nredact = [\"SECRET-[0-9]+\"]";
        let app = setup().config(redact).spawn().await;
        app.provider
            .will("m", [fails(429, "too many"), says("done")]);
        let run = app.run(agent, "go").await;
        assert_eq!(run.output(), "done");
        assert_eq!(app.provider.batches.created_and_cancelled().0.len(), 2);
        assert_eq!(count(&run.events().await, "retry.scheduled"), 1);
        app.provider.will("m", [fails(400, "no such SECRET-1")]);
        let run = app.run(agent, "go").await;
        let (code, message) = run.failure();
        assert_eq!(code, "provider_bad_request");
        assert!(message.contains("no such [redacted]"), "{message}");
    }
}

#[tokio::test]
async fn a_result_that_cannot_be_read_is_downloaded_three_times() {
    let bounded = "batch_poll = 0.02\nmax_reply = 65536";
    let config = CONFIG.replace("batch_poll = 0.02", bounded);
    for (agent, _) in WIRES {
        // The last download is that of the second batch. What is too large stays so.
        for (unreadable, downloads) in [
            (says("long ".repeat(20_000)), 1 + 1),
            (says("torn").cut(), 3 + 1),
        ] {
            let app = setup_with(&config).spawn().await;
            app.provider.will("m", [unreadable, says("done")]);
            let run = app.run(agent, "go").await;
            assert_eq!(run.output(), "done", "{agent}");
            assert_eq!(app.provider.batches.created_and_cancelled().0.len(), 2);
            assert_eq!(app.provider.batches.downloads(), downloads, "{agent}");
            assert_eq!(count(&run.events().await, "retry.scheduled"), 1);
            // The service may charge for the first.
            assert_eq!(run["tree"]["complete"], false);
        }
    }
}

#[tokio::test]
async fn a_result_that_a_proxy_has_replaced_is_read_by_a_later_poll() {
    for (agent, _) in WIRES {
        let app = setup().spawn().await;
        app.provider.will("m", [says("done")]);
        let bodies = ["<html>please wait</html>", ""];
        app.provider.batches.replace_downloads(bodies);
        let run = app.run(agent, "go").await;
        assert_eq!(run.output(), "done", "{agent}");
        assert_eq!(app.provider.batches.created_and_cancelled().0.len(), 1);
        assert_eq!(app.provider.batches.downloads(), 3, "{agent}");
        assert_eq!(count(&run.events().await, "retry.scheduled"), 0);
        assert_eq!(run["tree"]["complete"], true);
    }
}

#[tokio::test]
async fn an_expired_batch_is_a_timeout() {
    for (agent, _) in WIRES {
        let app = setup().spawn().await;
        app.provider.will("m", [says("late").expiring()]);
        let run = app.run(agent, "go").await;
        assert_eq!(run.failure().0, "timeout");
        assert_eq!(
            app.provider.batches.created_and_cancelled().0.len(),
            1,
            "not tried again"
        );
    }
}

#[tokio::test]
async fn a_provider_without_batches_gets_a_warning() {
    let app = TestApp::setup()
        .agent("llama", "model = \"ollama/m\"\nservice = \"batch\"")
        .spawn()
        .await;
    app.provider.will("m", [says("done")]);
    let run = app.run("llama", "go").await;
    assert_eq!(run.output(), "done");
    let events = run.events().await;
    let warning = events
        .iter()
        .find(|it| it.kind() == "model.warning")
        .expect("a warning");
    assert_eq!(
        warning["message"],
        "ollama/m is not offered with service \"batch\": sent with the default"
    );
    assert!(app.provider.batches.created_and_cancelled().0.is_empty());
}

#[tokio::test]
async fn what_a_request_without_a_batch_used_survives_a_kill() {
    let plain = "[providers.plain]\nkind = \"anthropic\"\napi_key = \"k\"\n\
                 base_url = \"{provider}\"\nservices = []\n";
    let agent = "model = \"plain/m\"\nservice = \"batch\"\n[retry]\ninitial_delay_ms = 60000";
    let mut app = setup_with(&format!("{CONFIG}{plain}"))
        .agent("plain", agent)
        .spawn()
        .await;
    app.provider.will("m", [empty()]);
    let id = app.start("plain", "go").await.id().to_owned();
    let mut events = app.events(&app.find(&id).await).await;
    events
        .until_matches(|events| count(events, "retry.scheduled") == 1)
        .await;
    app.crash_and_restart().await;
    assert_eq!(app.find(&id).await.usage(), (700, 300, 0));
    assert!(app.provider.batches.created_and_cancelled().0.is_empty());
}
