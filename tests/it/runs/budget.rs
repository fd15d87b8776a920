//! One account for a whole tree: tokens, money, tool calls and runs.

use serde_json::json;

use crate::support::app::TestApp;
use crate::support::gate::Gate;
use crate::support::provider::answer::{calls, delegates, fails, says};

const PLANNER: &str = "sub_agents = [\"reader\"]";

#[tokio::test]
async fn a_run_stops_when_its_tokens_are_used_and_keeps_its_text() {
    let app = TestApp::setup()
        .agent("planner", &format!("{PLANNER}\n[budget]\nmax_tokens = 100"))
        .agent("reader", "")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [delegates([("reader", "x")])
            .with_text("so far")
            .with_usage(100, 20)],
    );

    let run = app.run("planner", "go").await;

    assert_eq!(
        run.failure(),
        ("budget_exceeded", "budget exceeded: used 120 of 100 tokens")
    );
    assert_eq!(run["error"]["category"], "budget");
    assert_eq!(run["partial_content"], "so far");
    assert_eq!(
        run["tree"]["runs"], 1,
        "no tool is performed past the limit"
    );
}

#[tokio::test]
async fn reaching_the_limit_is_enough() {
    let app = TestApp::setup()
        .agent("planner", &format!("{PLANNER}\n[budget]\nmax_tokens = 100"))
        .agent("reader", "")
        .spawn()
        .await;
    app.provider
        .will("planner", [delegates([("reader", "x")]).with_usage(90, 10)]);

    let run = app.run("planner", "go").await;

    assert_eq!(run.failure().1, "budget exceeded: used 100 of 100 tokens");
}

#[tokio::test]
async fn a_final_reply_that_crosses_the_limit_still_completes() {
    let app = TestApp::setup()
        .agent("solo", "[budget]\nmax_tokens = 10")
        .spawn()
        .await;
    app.provider
        .will("solo", [says("a long answer").with_usage(500, 500)]);

    let run = app.run("solo", "go").await;

    assert_eq!(run.output(), "a long answer");
    assert_eq!(run.tree_usage(), (500, 500, 0));
}

#[tokio::test]
async fn cached_tokens_count() {
    let app = TestApp::setup()
        .agent("planner", &format!("{PLANNER}\n[budget]\nmax_tokens = 100"))
        .agent("reader", "")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [delegates([("reader", "x")])
            .with_usage(10, 5)
            .with_cached_tokens(80, 10)],
    );

    let run = app.run("planner", "go").await;

    assert_eq!(run.failure().1, "budget exceeded: used 105 of 100 tokens");
}

#[tokio::test]
async fn children_count_against_the_roots_budget() {
    let app = TestApp::setup()
        .agent("planner", &format!("{PLANNER}\n[budget]\nmax_tokens = 100"))
        .agent("reader", "")
        .spawn()
        .await;
    app.provider
        .will("planner", [delegates([("reader", "x")]).with_usage(15, 5)]);
    app.provider
        .will("reader", [says("read").with_usage(80, 10)]);

    let run = app.run("planner", "go").await;

    assert_eq!(run.failure().1, "budget exceeded: used 110 of 100 tokens");
    assert_eq!(run.tree_usage(), (95, 15, 1));
    assert_eq!(run.children().await[0].output(), "read");
}

#[tokio::test]
async fn a_childs_own_budget_bounds_its_subtree() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"middle\"]")
        .agent("middle", &format!("{PLANNER}\n[budget]\nmax_tokens = 50"))
        .agent("reader", "")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [
            delegates([("middle", "x")]).with_usage(1000, 1000),
            says("done"),
        ],
    );
    app.provider
        .will("middle", [delegates([("reader", "y")]).with_usage(15, 5)]);
    app.provider
        .will("reader", [says("read").with_usage(30, 10)]);

    let run = app.run("planner", "go").await;

    assert_eq!(run.output(), "done");
    assert_eq!(
        app.provider
            .wait_for_request("planner", 2)
            .await
            .tool_results(),
        [
            "Error: sub-agent \"middle\" failed - budget exceeded: used 60 of 50 tokens. You may retry or proceed \
          without this result."
        ]
    );
}

#[tokio::test]
async fn parallel_children_exceed_a_budget_by_little_more_than_one_request() {
    let app = TestApp::setup()
        .agent(
            "planner",
            &format!("{PLANNER}\n[budget]\nmax_tokens = 1000"),
        )
        .agent("reader", "[params]\nmax_tokens = 300")
        .spawn()
        .await;
    let tasks: Vec<_> = (0..12)
        .map(|n| {
            (
                "call_agent",
                json!({"agent": "reader", "task": n.to_string()}),
            )
        })
        .collect();
    app.provider
        .will("planner", [calls(tasks).with_usage(50, 50)]);
    let gate = Gate::closed();
    let door = gate.clone();
    app.provider.always("reader", move |_| {
        says("read").with_usage(20, 280).after_gate(&door)
    });

    let run = app.start("planner", "go").await;
    app.provider.wait_for_concurrency("reader", 1).await;
    gate.open();
    let run = run.wait_for_end().await;

    assert_eq!(run.failure().0, "budget_exceeded");
    let (input, output, _) = run.tree_usage();
    assert!(
        (1000..=1000 + 2 * 300).contains(&(input + output)),
        "used {}",
        input + output
    );
    // The others of the twelve got an error instead of a request.
    assert!(app.provider.requests_for("reader").len() <= 5);
    for child in run.children().await {
        if child.status() != "completed" {
            assert_eq!(child.failure().0, "budget_exceeded");
        }
    }
}

#[tokio::test]
async fn a_single_request_is_never_refused_for_its_size() {
    let app = TestApp::setup()
        .agent(
            "solo",
            "[params]\nmax_tokens = 8000\n[budget]\nmax_tokens = 10",
        )
        .spawn()
        .await;
    app.provider.will("solo", [says("fine").with_usage(2, 2)]);

    assert_eq!(app.run("solo", "go").await.output(), "fine");
}

#[tokio::test]
async fn tool_calls_are_bounded() {
    let app = TestApp::setup()
        .agent(
            "planner",
            &format!("{PLANNER}\n[budget]\nmax_tool_calls = 2"),
        )
        .agent("reader", "")
        .spawn()
        .await;
    let tasks = [("reader", "1"), ("reader", "2"), ("reader", "3")];
    app.provider
        .will("planner", [delegates(tasks).with_text("so far")]);
    app.provider.always("reader", |_| says("read"));

    let run = app.run("planner", "go").await;

    assert_eq!(
        run.failure(),
        ("budget_exceeded", "budget exceeded: used 2 of 2 tool calls")
    );
    assert_eq!(run["partial_content"], "so far");
    // Runs that are active when the limit is reached stop at their next check, as their caller does.
    assert!(app.provider.requests_for("reader").len() <= 2);
}

#[tokio::test]
async fn requests_admitted_before_the_limit_complete() {
    let app = TestApp::setup()
        .agent(
            "planner",
            &format!("{PLANNER}\n[budget]\nmax_tool_calls = 2"),
        )
        .agent("reader", "[retry]\ninitial_delay_ms = 1")
        .spawn()
        .await;
    let gate = Gate::closed();
    let tasks = [("reader", "1"), ("reader", "2"), ("reader", "3")];
    app.provider.will("planner", [delegates(tasks)]);
    let busy = || fails(500, "oops").after_gate(&gate);
    app.provider
        .will("reader", [busy(), busy(), says("read"), says("read")]);

    let run = app.start("planner", "go").await;
    let mut events = app.events(&run).await;
    let refused = events.until("tool.completed").await;
    gate.open();

    assert_eq!(
        refused.last().map(|event| event["is_error"] == true),
        Some(true)
    );
    assert_eq!(run.wait_for_end().await.failure().0, "budget_exceeded");
    for child in run.children().await {
        assert_eq!(child.output(), "read");
    }
}

#[tokio::test]
async fn runs_are_bounded() {
    let app = TestApp::setup()
        .agent("planner", &format!("{PLANNER}\n[budget]\nmax_runs = 3"))
        .agent("reader", "")
        .spawn()
        .await;
    let tasks = [("reader", "1"), ("reader", "2"), ("reader", "3")];
    app.provider.will("planner", [delegates(tasks)]);
    app.provider.always("reader", |_| says("read"));

    let run = app.run("planner", "go").await;

    assert_eq!(
        run.failure(),
        ("budget_exceeded", "budget exceeded: used 3 of 3 runs")
    );
    assert_eq!(run["tree"]["runs"], 3);
    // Runs that are active when the limit is reached stop at their next check, as their caller does.
    assert!(app.provider.requests_for("reader").len() <= 2);
}

const PRICES: &str = r#"
[prices."anthropic/planner"]
input = 3.0
output = 15.0
cache_read = 0.3
cache_write = 3.75
[prices."anthropic/reader"]
input = 1.0
output = 2.0
"#;

#[tokio::test]
async fn a_tree_costs_what_its_models_cost() {
    let app = TestApp::setup()
        .config(PRICES)
        .agent("planner", PLANNER)
        .agent("reader", "")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [
            delegates([("reader", "x")])
                .with_usage(1000, 100)
                .with_cached_tokens(2000, 400),
            says("done").with_usage(1000, 100),
        ],
    );
    app.provider
        .will("reader", [says("read").with_usage(500, 250)]);

    let run = app.run("planner", "go").await;

    assert_eq!(run.output(), "done");
    let planner = 2.0 * (1000.0 * 3.0 + 100.0 * 15.0) + 2000.0 * 0.3 + 400.0 * 3.75;
    let reader = 500.0 * 1.0 + 250.0 * 2.0;
    let cost = run["tree"]["cost_usd"].as_f64().expect("a cost");
    assert!((cost - (planner + reader) / 1e6).abs() < 1e-12, "{cost}");
    assert_eq!(run["tree"]["cache_read_tokens"], 2000);
    assert_eq!(run["tree"]["cache_write_tokens"], 400);
}

#[tokio::test]
async fn well_known_models_have_a_price_and_others_none() {
    let app = TestApp::setup()
        .agent("known", "model = \"anthropic/claude-sonnet-4-5-20250929\"")
        .agent("unknown", "[budget]\nmax_cost_usd = 1")
        .spawn()
        .await;
    app.provider.will(
        "claude-sonnet-4-5-20250929",
        [says("done").with_usage(1000, 100)],
    );
    app.provider
        .will("unknown", [says("done").with_usage(1000, 100)]);

    let known = app.run("known", "go").await;
    let unknown = app.run("unknown", "go").await;

    let cost = known["tree"]["cost_usd"].as_f64().expect("a cost");
    assert!(
        (cost - (1000.0 * 3.0 + 100.0 * 15.0) / 1e6).abs() < 1e-12,
        "{cost}"
    );
    assert_eq!(unknown["tree"]["cost_usd"], serde_json::Value::Null);
    app.daemon
        .wait_for_log("the price of anthropic/unknown is not known")
        .await;
}

#[tokio::test]
async fn money_is_bounded() {
    let app = TestApp::setup()
        .config(PRICES)
        .agent(
            "planner",
            &format!("{PLANNER}\n[budget]\nmax_cost_usd = 0.01"),
        )
        .agent("reader", "")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [delegates([("reader", "x")]).with_usage(5000, 0)],
    );

    let run = app.run("planner", "go").await;

    let (code, message) = run.failure();
    assert_eq!(code, "budget_exceeded");
    assert_eq!(message, "budget exceeded: used 0.015 of 0.01 USD");
}

#[tokio::test]
async fn a_request_can_set_the_budget() {
    let app = TestApp::setup()
        .agent("planner", PLANNER)
        .agent("reader", "")
        .spawn()
        .await;
    app.provider
        .will("planner", [delegates([("reader", "x")]).with_usage(10, 10)]);

    let run = app
        .run_with(
            "planner",
            json!({"input": "go", "budget": {"max_tokens": 20}}),
        )
        .await;

    assert_eq!(run.failure().1, "budget exceeded: used 20 of 20 tokens");
}

#[tokio::test]
async fn two_budget_refusals_in_one_reply_survive_a_crash() {
    let mut app = TestApp::setup()
        .agent(
            "planner",
            "sub_agents = [\"child\", \"slow\"]\n[budget]\nmax_tool_calls = 3",
        )
        .agent(
            "child",
            "sub_agents = [\"solo\"]\n[sub_agents_config]\nparallel = false\n[budget]\nmax_runs = 1",
        )
        .agent("solo", "")
        .agent("slow", "")
        .spawn()
        .await;
    let (sent, done) = (Gate::closed(), Gate::closed());
    app.provider
        .will("planner", [delegates([("child", "x"), ("slow", "y")])]);
    // The first is refused by the child's own budget, the second by the root's.
    app.provider.will(
        "child",
        [delegates([("solo", "1"), ("solo", "2")]).after_gate(&sent)],
    );
    let door = done.clone();
    app.provider
        .always("slow", move |_| says("done").after_gate(&door));
    let run = app.start("planner", "go").await;
    let id = run.id().to_owned();
    app.provider.wait_for_request("slow", 1).await;
    sent.open();
    let mut events = app.events(&run).await;
    events.until("agent.returned").await;

    app.crash_and_restart().await;
    done.open();

    let run = app.find(&id).await.wait_for_end().await;
    let refused = "budget exceeded: used 3 of 3 tool calls";
    assert_eq!(run.failure(), ("budget_exceeded", refused));
    assert_eq!(app.provider.requests_for("planner").len(), 1);
    let children = run.children().await;
    assert_eq!(children[0].failure().1, "budget exceeded: used 1 of 1 runs");
}

#[tokio::test]
async fn a_clients_unpriced_model_cannot_bypass_a_money_budget() {
    let app = TestApp::setup()
        .config("[providers.scripted]\nscripts = [\"scripts\"]\n")
        .file("config/scripts/own.toml", "[[replies]]\ntext = \"scripted\"\n")
        .agent("held", "model = \"anthropic/claude-sonnet-4-5\"\nfallback_models = [\"openai/backup\"]\n[budget]\nmax_cost_usd = 1")
        .agent("free", "")
        .spawn()
        .await;
    app.provider.always("priceless", |_| says("done"));
    app.provider.always("claude-opus-4-5", |_| says("done"));
    let with = |model: &str| json!({"input": "go", "model": model});

    for path in ["/agents/held/runs", "/agents/held/dry-run"] {
        let got = app.post(path, &with("anthropic/priceless")).await;
        let detail = got.problem(422);
        assert!(
            detail.contains("the price of anthropic/priceless is not known"),
            "{detail}"
        );
        let problem = got.json();
        assert_eq!(problem["code"], "unpriced_model");
        assert_eq!(problem["errors"][0]["pointer"], "/model");
    }
    assert!(app.provider.requests().is_empty(), "no model was requested");
    // The request's own budget would not hold it either.
    let mut own = with("anthropic/priceless");
    own["budget"] = json!({"max_cost_usd": 1});
    app.post("/agents/free/runs", &own).await.problem(422);

    assert_eq!(
        app.run_with("held", with("anthropic/claude-opus-4-5"))
            .await
            .output(),
        "done"
    );
    assert_eq!(
        app.run_with("held", with("scripted/own")).await.output(),
        "scripted"
    );
    assert_eq!(
        app.run_with("free", with("anthropic/priceless"))
            .await
            .output(),
        "done"
    );
    // Nor does a fork get around it.
    let source = app.run_with("free", with("anthropic/priceless")).await;
    let fork = format!("/runs/{}/fork", source.id());
    let own = json!({"at": {"turn": 1}, "budget": {"max_cost_usd": 1}});
    app.post(&fork, &own).await.problem(422);
    let again = json!({"at": {"turn": 1}, "definition": "current"});
    assert_eq!(app.post(&fork, &again).await.status, 202);
    app.write_agent("free", "[budget]\nmax_cost_usd = 1");
    app.get_until("/agents/free", |got| {
        got.json()["budget"]["max_cost_usd"] == 1.0
    })
    .await;
    let detail = app.post(&fork, &again).await.problem(422);
    assert!(
        detail.contains("the price of anthropic/priceless is not known"),
        "{detail}"
    );
    let priced = json!({"at": {"turn": 1}, "definition": "current", "edit": {"model": "anthropic/claude-opus-4-5"}});
    assert_eq!(app.post(&fork, &priced).await.status, 202);

    // What the operator's own files name is warned of.
    app.daemon
        .wait_for_log("the price of openai/backup is not known")
        .await;
}

#[tokio::test]
async fn an_oversized_conversation_is_not_sent_again() {
    let app = TestApp::setup()
        .agent("solo", "tools = [\"find_path\"]")
        .config("[limits]\nconversation_bytes = \"3 KiB\"")
        .spawn()
        .await;
    let large = || calls([("find_path", json!({"pattern": "x".repeat(1000)}))]);
    app.provider.will("solo", [large(), large(), says("never")]);

    let run = app.run("solo", "go").await;

    let (code, message) = run.failure();
    assert_eq!(code, "budget_exceeded");
    assert!(
        message.ends_with("of 3072 bytes of conversation (limits.conversation_bytes)"),
        "{message}"
    );
    assert_eq!(app.provider.requests().len(), 2);
}
