//! Usage of runs and trees equals the provider's ledger, however a run ends.

use serde_json::{Value, json};
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::support::app::TestApp;
use crate::support::hanging_server::HangingServer;
use crate::support::provider::answer::{calls, delegates, fails, hangs, says};
use crate::support::refusing_address;
use crate::support::run::Run;

/// Checks that the tree's usage is the sum over its runs and what the provider charged for.
async fn settled(app: &TestApp, run: &Run<'_>) {
    let ledger = app.provider.ledger();
    let (input, output, calls) = run.tree_usage();
    assert_eq!((input, output), (ledger.input, ledger.output), "{run:?}");
    assert_eq!(run["tree"]["model_calls"], ledger.replies);
    let (mut sum, mut runs) = ((0, 0, 0), 0);
    let mut unread = vec![run.reload().await];
    while let Some(one) = unread.pop() {
        let own = one.usage();
        sum = (sum.0 + own.0, sum.1 + own.1, sum.2 + own.2);
        runs += 1;
        let children = one.children().await;
        let below: u64 = children.iter().map(|child| child.tree_usage().0).sum();
        assert_eq!(one.tree_usage().0, own.0 + below, "{one:?}");
        unread.extend(children);
    }
    assert_eq!(sum, (input, output, calls));
    assert_eq!(run["tree"]["runs"], runs);
}

#[tokio::test]
async fn a_tree_of_completed_runs_is_counted_exactly() {
    let app = TestApp::setup()
        .agent("root", "sub_agents = [\"middle\"]")
        .agent(
            "middle",
            "model = \"openai/middle\"\nsub_agents = [\"leaf\"]",
        )
        .agent("leaf", "model = \"ollama/leaf\"\nstream = true")
        .spawn()
        .await;
    app.provider.will(
        "root",
        [
            delegates([("middle", "1"), ("middle", "2")])
                .with_usage(11, 7)
                .with_cached_tokens(100, 50),
            says("done").with_usage(31, 13),
        ],
    );
    app.provider
        .always("middle", |seen| match seen.tool_results().len() {
            0 => delegates([("leaf", "a"), ("leaf", "b"), ("leaf", "c")]).with_usage(101, 3),
            _ => says("summary").with_usage(203, 5).with_cached_tokens(40, 0),
        });
    app.provider
        .always("leaf", |_| says("one two three").with_usage(1009, 17));

    let run = app.run("root", "go").await;

    assert_eq!(run.output(), "done");
    assert_eq!(run.usage(), (11 + 150 + 31, 20, 2));
    assert_eq!(run["tree"]["complete"], true);
    settled(&app, &run).await;
    assert_eq!(run["tree"]["runs"], 9);
}

#[tokio::test]
async fn usage_of_failed_and_timed_out_descendants_is_counted() {
    let app = TestApp::setup()
        .agent(
            "root",
            "sub_agents = [\"failing\", \"overdue\", \"looping\"]",
        )
        .agent(
            "failing",
            "sub_agents = [\"leaf\"]\n[retry]\nmax_retries = 0",
        )
        .agent("overdue", "timeout = 20\nsub_agents = [\"leaf\"]")
        .agent(
            "looping",
            "sub_agents = [\"leaf\"]\n[limits]\nmax_turns = 2",
        )
        .agent("leaf", "")
        .spawn()
        .await;
    app.provider.will(
        "root",
        [
            delegates([("failing", "1"), ("overdue", "2"), ("looping", "3")]),
            says("done"),
        ],
    );
    app.provider
        .always("leaf", |_| says("leaf").with_usage(1000, 100));
    app.provider.will(
        "failing",
        [
            delegates([("leaf", "a")]).with_usage(20, 2),
            fails(500, "broken"),
        ],
    );
    app.provider.will(
        "overdue",
        [delegates([("leaf", "b")]).with_usage(30, 3), hangs()],
    );
    app.provider.will(
        "looping",
        [
            calls([("fly", json!({}))]).with_usage(40, 4),
            calls([("fly", json!({}))]).with_usage(50, 5),
        ],
    );

    let run = app.run("root", "go").await;

    assert_eq!(run.output(), "done");
    let children = run.children().await;
    let codes: Vec<_> = children.iter().map(|child| child.failure().0).collect();
    assert_eq!(codes, ["provider_server", "timeout", "max_turns"]);
    assert_eq!(children[1].usage(), (30, 3, 1));
    assert_eq!(children[1].tree_usage(), (1030, 103, 1));
    settled(&app, &run).await;
}

#[tokio::test]
async fn usage_of_cancelled_descendants_is_counted_and_the_tree_is_current() {
    let app = TestApp::setup()
        .agent("root", "sub_agents = [\"middle\"]")
        .agent("middle", "sub_agents = [\"leaf\"]")
        .agent("leaf", "")
        .spawn()
        .await;
    app.provider
        .will("root", [delegates([("middle", "x")]).with_usage(10, 1)]);
    app.provider.will(
        "middle",
        [delegates([("leaf", "y")]).with_usage(20, 2), hangs()],
    );
    app.provider.will("leaf", [says("leaf").with_usage(30, 3)]);

    let run = app.start("root", "go").await;
    app.provider.wait_for_request("middle", 2).await;
    let live = run.reload().await;
    assert_eq!(live.status(), "running");
    assert_eq!(live.usage(), (10, 1, 1));
    assert_eq!(live.tree_usage(), (60, 6, 2));
    assert_eq!(live["tree"]["runs"], 3);
    let cancelled = run.cancel("enough").await;

    assert_eq!(cancelled.tree_usage(), (60, 6, 2));
    settled(&app, &cancelled).await;
}

#[tokio::test]
async fn retried_requests_are_counted_once() {
    let app = TestApp::setup()
        .agent("solo", "stream = true\n[retry]\ninitial_delay_ms = 1")
        .spawn()
        .await;
    app.provider.will(
        "solo",
        [
            fails(500, "oops"),
            fails(429, "slow down"),
            says("done").with_usage(9, 4),
        ],
    );

    let run = app.run("solo", "go").await;

    assert_eq!(run.output(), "done");
    assert_eq!(run.usage(), (9, 4, 0));
    settled(&app, &run).await;
}

#[tokio::test]
async fn a_provider_that_reports_nothing_makes_the_sum_incomplete() {
    let app = TestApp::setup()
        .agent("root", "sub_agents = [\"leaf\"]")
        .agent("leaf", "")
        .spawn()
        .await;
    app.provider
        .will("root", [delegates([("leaf", "x")]), says("done")]);
    app.provider.will("leaf", [says("leaf").without_usage()]);

    let run = app.run("root", "go").await;

    assert_eq!(run.output(), "done");
    assert_eq!(run["tree"]["complete"], false);
    assert_eq!(run.tree_usage(), (20, 10, 1));
    assert_eq!(run["tree"]["cost_usd"], Value::Null);
}

/// Starts a host that breaks each connection once it has read something, and returns its URL.
async fn breaking_server() -> (String, JoinSet<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let port = listener.local_addr().expect("an address").port();
    let mut server = JoinSet::new();
    server.spawn(async move {
        while let Ok((mut connection, _)) = listener.accept().await {
            let _ = connection.read(&mut [0; 4096]).await;
        }
    });
    (format!("http://127.0.0.1:{port}"), server)
}

#[tokio::test]
async fn a_request_that_was_sent_and_has_no_response_makes_the_sum_incomplete() {
    let hanging = HangingServer::start().await;
    let (breaking, _server) = breaking_server().await;
    let (_socket, refusing) = refusing_address();
    let mut setup = TestApp::setup();
    for (name, url, timeout) in [
        ("hanging", hanging.url("127.0.0.1"), 1),
        ("breaking", breaking, 60),
        ("refusing", format!("http://{refusing}"), 60),
    ] {
        let provider =
            format!("[providers.{name}]\nkind = \"anthropic\"\napi_key = \"key-of-{name}\"");
        setup = setup
            .config(&format!(
                "{provider}\nbase_url = \"{url}\"\ntimeout = {timeout}"
            ))
            .agent(
                name,
                &format!("model = \"{name}/x\"\n[retry]\nmax_retries = 0"),
            );
    }
    let app = setup.spawn().await;
    for (agent, code, is_complete) in [
        ("hanging", "timeout", false),
        ("breaking", "provider_server", false),
        ("refusing", "provider_server", true),
    ] {
        let run = app.run(agent, "go").await;
        assert_eq!(run.failure().0, code, "{run:?}");
        assert_eq!(run["tree"]["complete"], is_complete, "{agent}");
    }
}
