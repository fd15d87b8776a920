//! Monitoring: exact numbers at `/metrics` after known work, and log lines that say of which
//! run they are.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;

use crate::support::app::{ApiResponse, Setup, TestApp, send};
use crate::support::daemon::{Daemon, axed_command};
use crate::support::provider::answer::{delegates, fails, hangs, says};
use crate::support::within_timeout;

/// A retry policy that does not make stories wait.
const QUICK: &str = "[retry]\ninitial_delay_ms = 1\nmax_delay_ms = 2";

/// What the contract names, and of what type each is.
const NAMES: [(&str, &str); 47] = [
    ("axed_runs_total", "counter"),
    ("axed_runs_failed_total", "counter"),
    ("axed_runs_running", "gauge"),
    ("axed_runs_queued", "gauge"),
    ("axed_runs_suspended", "gauge"),
    ("axed_runs_asleep", "gauge"),
    ("axed_runs_queued_bytes", "gauge"),
    ("axed_request_body_bytes", "gauge"),
    ("axed_queue_wait_seconds", "histogram"),
    ("axed_run_duration_seconds", "histogram"),
    ("axed_turn_duration_seconds", "histogram"),
    ("axed_tool_duration_seconds", "histogram"),
    ("axed_tokens_total", "counter"),
    ("axed_cost_usd_total", "counter"),
    ("axed_provider_requests_total", "counter"),
    ("axed_provider_errors_total", "counter"),
    ("axed_scores_total", "counter"),
    ("axed_scores_failed_total", "counter"),
    ("axed_rollouts_stopped_total", "counter"),
    ("axed_scores_skipped_total", "counter"),
    ("axed_retries_total", "counter"),
    ("axed_child_runs_total", "counter"),
    ("axed_cancel_seconds", "histogram"),
    ("axed_sse_clients", "gauge"),
    ("axed_webhook_deliveries_total", "counter"),
    ("axed_webhook_deliveries_pending", "gauge"),
    ("axed_approvals_pending", "gauge"),
    ("axed_approvals_oldest_age_seconds", "gauge"),
    ("axed_questions_pending", "gauge"),
    ("axed_questions_oldest_age_seconds", "gauge"),
    ("axed_inputs_pending", "gauge"),
    ("axed_inputs_oldest_age_seconds", "gauge"),
    ("axed_budget_used", "gauge"),
    ("axed_budget_limit", "gauge"),
    ("axed_rate_limit_limit", "gauge"),
    ("axed_rate_limit_used", "gauge"),
    ("axed_rate_limit_waiting", "gauge"),
    ("axed_mcp_server_up", "gauge"),
    ("axed_mcp_calls_total", "counter"),
    ("axed_mcp_call_errors_total", "counter"),
    ("axed_store_writable", "gauge"),
    ("axed_store_commits_total", "counter"),
    ("axed_store_commit_seconds", "histogram"),
    ("axed_store_queue", "gauge"),
    ("axed_ready", "gauge"),
    ("axed_log_lines_dropped_total", "counter"),
    ("axed_build_info", "gauge"),
];

/// A reading of `/metrics`: name with labels, and value.
pub struct Page(BTreeMap<String, f64>);

impl Page {
    pub fn read(got: &ApiResponse) -> Self {
        assert_eq!(got.status, 200, "{}", got.text);
        let kind = got.header("content-type");
        assert_eq!(kind, "text/plain; version=0.0.4; charset=utf-8");
        let sample = |line: &str| {
            let (series, value) = line.rsplit_once(' ').expect("a series and its value");
            (series.to_owned(), value.parse().expect("a number"))
        };
        let samples = got.text.lines().filter(|line| !line.starts_with('#'));
        Self(samples.map(sample).collect())
    }

    pub fn of(&self, series: &str) -> f64 {
        let value = self.0.get(series).copied();
        value.unwrap_or_else(|| panic!("{series} is missing in {:#?}", self.0))
    }

    /// All series of one metric.
    pub fn all(&self, name: &str) -> BTreeMap<&str, f64> {
        let of = |series: &&String| {
            let rest = series.strip_prefix(name);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('{'))
        };
        let keys = self.0.keys().filter(of);
        keys.map(|series| (series.as_str(), self.0[series]))
            .collect()
    }

    /// The sum of all series of one metric.
    fn sum(&self, name: &str) -> f64 {
        self.all(name).values().sum()
    }
}

pub async fn scrape(app: &TestApp) -> Page {
    Page::read(&app.get("/metrics").await)
}

/// What the daemon has logged, once this is part of it.
async fn logged(daemon: &Daemon, part: &str) -> String {
    daemon.wait_for_log(part).await;
    daemon.log()
}

/// A planner with a reader and one that fails.
fn family() -> Setup {
    TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\", \"broken\"]")
        .agent("reader", QUICK)
        .agent("broken", "")
}

const EXPECTED_RUNS: [(&str, f64); 5] = [
    ("axed_runs_total{agent=\"broken\",status=\"failed\"}", 1.0),
    (
        "axed_runs_total{agent=\"patient\",status=\"completed\"}",
        1.0,
    ),
    (
        "axed_runs_total{agent=\"planner\",status=\"completed\"}",
        1.0,
    ),
    (
        "axed_runs_total{agent=\"reader\",status=\"completed\"}",
        1.0,
    ),
    ("axed_runs_total{agent=\"slow\",status=\"cancelled\"}", 1.0),
];

const EXPECTED_TOKENS: [(&str, f64); 8] = [
    (
        "axed_tokens_total{model=\"anthropic/patient\",kind=\"input\"}",
        10.0,
    ),
    (
        "axed_tokens_total{model=\"anthropic/patient\",kind=\"output\"}",
        5.0,
    ),
    (
        "axed_tokens_total{model=\"anthropic/planner\",kind=\"input\"}",
        20.0,
    ),
    (
        "axed_tokens_total{model=\"anthropic/planner\",kind=\"output\"}",
        10.0,
    ),
    (
        "axed_tokens_total{model=\"anthropic/reader\",kind=\"input\"}",
        10.0,
    ),
    (
        "axed_tokens_total{model=\"anthropic/reader\",kind=\"output\"}",
        3.0,
    ),
    (
        "axed_tokens_total{model=\"anthropic/reader\",kind=\"cache_read\"}",
        2.0,
    ),
    (
        "axed_tokens_total{model=\"anthropic/reader\",kind=\"cache_write\"}",
        1.0,
    ),
];

const EXPECTED_ERRORS: [(&str, f64); 2] = [
    (
        "axed_provider_errors_total{provider=\"anthropic\",category=\"bad_request\"}",
        1.0,
    ),
    (
        "axed_provider_errors_total{provider=\"anthropic\",category=\"server\"}",
        1.0,
    ),
];

const EXPECTED_HISTOGRAMS: &[(&str, f64)] = &[
    ("axed_queue_wait_seconds", 3.0),
    ("axed_run_duration_seconds", 5.0),
    ("axed_turn_duration_seconds", 4.0),
    ("axed_tool_duration_seconds", 2.0),
    ("axed_cancel_seconds", 1.0),
];

fn have_counts(page: &Page, histograms: &[(&str, f64)]) {
    for (name, count) in histograms {
        assert_eq!(page.sum(&format!("{name}_count")), *count, "{name}");
        let mut buckets = page.all(&format!("{name}_bucket"));
        buckets.retain(|series, _| series.contains("le=\"+Inf\""));
        assert_eq!(buckets.values().sum::<f64>(), *count, "{name}");
    }
}

#[tokio::test]
async fn a_scrape_has_the_exact_counts() {
    let app = family()
        .config(
            "[runs]\nmax_running = 1\n[prices.\"anthropic/planner\"]\ninput = 3.0\noutput = 15.0",
        )
        .agent("slow", "")
        .agent("patient", "")
        .spawn()
        .await;
    // A tree with a retry and a failing child.
    app.provider.will(
        "planner",
        [delegates([("reader", "x"), ("broken", "y")]), says("done")],
    );
    let hostile = "m\"} 1\naxed_runs_running 99";
    let read = says("read").with_usage(7, 3).with_cached_tokens(2, 1);
    app.provider
        .will("reader", [fails(500, "oops"), read.with_model(hostile)]);
    app.provider.will("broken", [fails(400, "no")]);
    let planner = app.run("planner", "go").await;
    assert_eq!(planner.output(), "done");

    // One that holds the only slot, is followed by a client and is cancelled; one that waits for the slot.
    app.provider.will("slow", [hangs()]);
    app.provider.will("patient", [says("at last")]);
    let slow = app.start("slow", "go").await;
    app.provider.wait_for_concurrency("slow", 1).await;
    let mut following = app.events(&slow).await;
    following.until("run.queued").await;
    let patient = app.start("patient", "go").await;
    let page = scrape(&app).await;
    assert_eq!(page.of("axed_runs_running"), 1.0);
    assert_eq!(page.of("axed_runs_queued"), 1.0);
    assert_eq!(page.of("axed_sse_clients"), 1.0);
    assert_eq!(page.of("axed_queue_wait_seconds_count"), 2.0);
    assert_eq!(page.of("axed_cancel_seconds_count"), 0.0);
    let slow = slow.cancel("enough").await;
    let patient = patient.wait_for_end().await;
    assert_eq!(patient.output(), "at last");
    following.rest().await;

    let got = app
        .get_until("/metrics", |got| got.text.contains("axed_sse_clients 0\n"))
        .await;
    let page = Page::read(&got);
    assert_eq!(page.of("axed_runs_running"), 0.0);
    assert_eq!(page.of("axed_runs_queued"), 0.0);
    let mut runs = page.all("axed_runs_total");
    runs.retain(|_, count| *count > 0.0);
    assert_eq!(runs, BTreeMap::from(EXPECTED_RUNS));
    let mut tokens = page.all("axed_tokens_total");
    tokens.retain(|_, count| *count > 0.0);
    assert_eq!(tokens, BTreeMap::from(EXPECTED_TOKENS));
    let cost = [("axed_cost_usd_total{model=\"anthropic/planner\"}", 0.000_21)];
    assert_eq!(page.all("axed_cost_usd_total"), BTreeMap::from(cost));
    let failed = "axed_runs_failed_total{agent=\"broken\",code=\"provider_bad_request\"}";
    assert_eq!(
        page.all("axed_runs_failed_total"),
        BTreeMap::from([(failed, 1.0)])
    );
    // The request of the cancelled run had no end.
    let requests = "axed_provider_requests_total{provider=\"anthropic\"}";
    assert_eq!(page.of(requests), 6.0);
    let mut errors = page.all("axed_provider_errors_total");
    errors.retain(|_, count| *count > 0.0);
    assert_eq!(errors, BTreeMap::from(EXPECTED_ERRORS));
    for series in [
        "axed_run_duration_seconds_count{agent=\"reader\"}",
        "axed_turn_duration_seconds_count{model=\"anthropic/reader\"}",
    ] {
        assert_eq!(page.of(series), 1.0, "{series}");
    }
    let delegations = "axed_tool_duration_seconds_count{tool=\"call_agent\"}";
    assert_eq!(page.of(delegations), 2.0);
    let retries = [("axed_retries_total{provider=\"anthropic\"}", 1.0)];
    assert_eq!(page.all("axed_retries_total"), BTreeMap::from(retries));
    assert_eq!(page.of("axed_child_runs_total{depth=\"1\"}"), 2.0);
    assert_eq!(page.of("axed_child_runs_total{depth=\"2\"}"), 0.0);
    have_counts(&page, EXPECTED_HISTOGRAMS);
    // The same times as in the API.
    let mut took = 0;
    let mut ids = vec![planner.id().to_owned()];
    let children = planner.children().await;
    for run in children.iter().chain([&planner, &slow, &patient]) {
        took += run["duration_ms"].as_u64().expect("a duration");
        ids.push(run.id().to_owned());
    }
    let sum = page.sum("axed_run_duration_seconds_sum");
    assert_eq!((sum * 1000.0).round() as u64, took);
    assert!(page.of("axed_store_commits_total") >= 1.0);
    assert!(ids.iter().all(|id| !got.text.contains(id)), "{}", got.text);
}

#[tokio::test]
async fn every_metric_is_described_from_the_start() {
    let app = TestApp::setup().prefix("/axed").spawn().await;

    // What the store says of itself may come late.
    let is_idle = |got: &ApiResponse| {
        let page = Page::read(got);
        page.of("axed_ready") == 1.0 && page.of("axed_store_queue") == 0.0
    };
    let got = app.get_until("/metrics", is_idle).await;

    let page = Page::read(&got);
    for (name, kind) in NAMES {
        assert!(
            got.text.contains(&format!("\n# TYPE {name} {kind}\n")),
            "{name}"
        );
        assert!(got.text.contains(&format!("# HELP {name} ")), "{name}");
    }
    assert_eq!(got.text.matches("# TYPE axed_").count(), NAMES.len());
    let is_one = |series: &str| {
        let names = ["axed_ready", "axed_store_writable", "axed_build_info{"];
        names.iter().any(|name| series.starts_with(name))
    };
    for (series, value) in &page.0 {
        let expected = f64::from(u8::from(is_one(series)));
        if !series.starts_with("axed_store_commit") && !series.starts_with("process_") {
            assert_eq!(*value, expected, "{series}");
        }
    }
    assert_eq!(page.of("axed_cancel_seconds_count"), 0.0);
    let url = format!("{}/metrics", app.daemon.url);
    send(app.client.get(url)).await.problem(404);
    app.post("/metrics", &Value::Null).await.problem(405);
}

#[tokio::test]
async fn a_commit_of_the_store_is_counted() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.always("solo", |_| says("done"));

    let mut before = scrape(&app).await.of("axed_store_commits_total");
    for _ in 0..3 {
        app.run("solo", "go").await;
        let after = scrape(&app).await.of("axed_store_commits_total");
        // At least the entry that accepts it and the one that ends it.
        assert!(after >= before + 2.0, "{before} {after}");
        before = after;
    }
}

#[tokio::test]
async fn label_values_from_requests_are_bounded() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let body = |model: &str| serde_json::json!({"input": "x", "model": model});
    for at in 0..510 {
        let model = format!("made-up-{at}");
        app.provider.will(&model, [says("done")]);
        let run = app
            .run_with("solo", body(&format!("anthropic/{model}")))
            .await;
        assert_eq!(run.output(), "done");
    }

    let page = scrape(&app).await;

    let input = |series: &&str| series.ends_with("kind=\"input\"}");
    let tokens = page.all("axed_tokens_total");
    assert_eq!(tokens.keys().filter(|series| input(series)).count(), 501);
    let others = "axed_tokens_total{model=\"(other)\",kind=\"input\"}";
    assert_eq!(page.of(others), 100.0);
}

#[tokio::test]
async fn metrics_have_a_separate_listener_if_configured() {
    let app = TestApp::setup()
        .prefix("/axed")
        .server("metrics_listen = \"127.0.0.1:0\"")
        .agent("solo", "")
        .spawn()
        .await;
    app.provider.will("solo", [says("done")]);
    app.run("solo", "go").await;
    let log = logged(&app.daemon, "/metrics").await;
    let url = log
        .split("Metrics are at ")
        .nth(1)
        .and_then(|rest| rest.split('"').next())
        .expect("the address");

    let page = Page::read(&send(app.client.get(url)).await);

    let series = "axed_runs_total{agent=\"solo\",status=\"completed\"}";
    assert_eq!(page.of(series), 1.0);
    app.get("/metrics").await.problem(404);
    let runs = url.replace("/metrics", "/runs");
    send(app.client.get(runs)).await.problem(404);
    let mut app = app;
    app.daemon.signal("TERM");
    assert!(app.daemon.wait_for_exit().await.success());
}

#[tokio::test]
async fn metrics_are_not_served_publicly() {
    let home = tempfile::tempdir().expect("a directory");
    std::fs::write(
        home.path().join("axed.toml"),
        "[server]\nlisten = \"127.0.0.1:0\"\nmetrics_listen = \"0.0.0.0:0\"\n[agents]\ndirs = [\".\"]",
    )
    .expect("a file");
    let mut command = axed_command(home.path(), &["serve", "--config", "axed.toml"]);
    let ended = within_timeout("the refusal", command.output())
        .await
        .expect("axed");

    assert_eq!(ended.status.code(), Some(2));
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(
        said.contains("server.metrics_listen 0.0.0.0:0 is not a loopback address"),
        "{said}"
    );
}

/// The names of the series that are described, although some have no sample yet.
fn described(text: &str) -> BTreeSet<String> {
    let lines = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let described = lines.filter_map(|line| line.split_once(' '));
    described
        .flat_map(|(name, kind)| match kind {
            "histogram" => ["_bucket", "_sum", "_count"]
                .map(|suffix| format!("{name}{suffix}"))
                .to_vec(),
            _ => vec![name.to_owned()],
        })
        .collect()
}

#[tokio::test]
async fn the_dashboard_shows_these_metrics_and_no_others() {
    let app = TestApp::spawn().await;
    let known = described(&app.get("/metrics").await.text);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/grafana-dashboard.json");
    let text = std::fs::read_to_string(path).expect("the dashboard");
    let dashboard: Value = serde_json::from_str(&text).expect("JSON");

    let mut queries = Vec::new();
    let mut ids = BTreeSet::new();
    for panel in dashboard["panels"].as_array().expect("panels") {
        assert!(ids.insert(panel["id"].as_u64()), "{panel}");
        for target in panel["targets"].as_array().into_iter().flatten() {
            queries.push(target["expr"].as_str().expect("a query"));
        }
    }
    for variable in dashboard["templating"]["list"].as_array().expect("a list") {
        queries.extend(variable["query"].as_str());
    }
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = queries
        .iter()
        .flat_map(|query| query.split(|c| !is_word(c)));
    let named: BTreeSet<&str> = words.filter(|term| term.starts_with("axed_")).collect();
    for name in &named {
        assert!(known.contains(*name), "{name} is no metric");
    }
    for (name, _) in NAMES {
        let is_shown = named.iter().any(|shown| shown.starts_with(name));
        assert!(is_shown, "{name} is not on the dashboard");
    }
}

#[tokio::test]
async fn every_log_line_of_a_run_has_its_ids_and_depth() {
    let app = family().spawn().await;
    app.provider.will(
        "planner",
        [delegates([("reader", "x"), ("broken", "y")]), says("done")],
    );
    app.provider
        .will("reader", [fails(500, "oops"), says("read")]);
    app.provider.will("broken", [fails(400, "no")]);
    let planner = app.run("planner", "go").await;
    assert_eq!(
        app.delete(&format!("/runs/{}", planner.id())).await.status,
        204
    );

    let log = logged(&app.daemon, "Deleted").await;

    let lines = log
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok());
    let of_runs: Vec<Value> = lines
        .filter(|line: &Value| {
            line["message"].as_str().is_some_and(|m| m.contains("run_"))
                || !line["run.id"].is_null()
        })
        .collect();
    let place = |line: &Value| {
        (
            line["agent"].as_str().map(str::to_owned),
            line["depth"].as_u64(),
        )
    };
    let places: BTreeSet<_> = of_runs.iter().map(place).collect();
    let expected = [("planner", 0), ("reader", 1), ("broken", 1)];
    let expected = expected.map(|(agent, depth)| (Some(agent.to_owned()), Some(depth)));
    assert_eq!(places, BTreeSet::from(expected), "{of_runs:#?}");
    for line in of_runs {
        assert_eq!(line["run.root"], planner.id(), "{line}");
        assert!(line["run.id"].is_string(), "{line}");
    }
}
