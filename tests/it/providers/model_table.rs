//! The table of models: `[models] file`, overrides by key, last days, prices by day, tier and region.

use std::process::Output;

use axed::config::models::lookup::today;
use jiff::ToSpan;
use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::daemon::axed_command;
use crate::support::provider::answer::{raw, says};
use crate::support::run::Run;

/// A file of models in which `anthropic/solo` costs this, in and out.
fn table(price: &str) -> String {
    format!("as_of = \"2030-01-01\"\n[anthropic.\"solo\"]\ninput = {price}\noutput = {price}\n")
}

/// The last day of a model, so many days from now.
fn day_in(days: i64) -> String {
    let day = today().checked_add(days.days()).expect("a day");
    day.to_string()
}

/// In millionths of a dollar.
fn cost(run: &Run<'_>) -> f64 {
    (run["tree"]["cost_usd"].as_f64().expect("a cost") * 1e6).round()
}

fn warning_codes(run: &Run<'_>) -> Vec<String> {
    let warnings = run["warnings"].as_array().expect("warnings");
    let codes = warnings.iter().filter_map(|it| it["code"].as_str());
    codes.map(str::to_owned).collect()
}

async fn axed(app: &TestApp, arguments: &[&str]) -> Output {
    let mut command = axed_command(&app.path(""), arguments);
    command.output().await.expect("a finished process")
}

#[tokio::test]
async fn a_changed_file_of_models_is_in_force_and_a_broken_one_is_named() {
    let app = TestApp::setup()
        .config("[models]\nfile = \"models.toml\"")
        .file("config/models.toml", &table("1"))
        .agent("solo", "")
        .spawn()
        .await;
    app.provider
        .always("solo", |_| says("done").with_usage(100, 50));
    let run = app.run("solo", "go").await;
    assert_eq!(cost(&run), 150.0);
    assert!(warning_codes(&run).is_empty());

    let last_day = day_in(3);
    let changed = format!(
        "{}retires = \"{last_day}\"\nsuccessor = \"duo\"\n",
        table("2")
    );
    app.write("config/models.toml", &changed);
    let expected = format!("anthropic/solo ends on {last_day}: use anthropic/duo");
    app.get_until("/agents/solo", |got| got.text.contains(&expected))
        .await;
    let run = app.run("solo", "go").await;
    assert_eq!(cost(&run), 300.0);
    assert_eq!(warning_codes(&run), ["model_ends"]);
    assert_eq!(run["warnings"][0]["message"], expected);

    app.write("config/models.toml", &format!("{}inputs = 5\n", table("9")));
    app.daemon.wait_for_log("last good facts stay").await;
    let log = app.daemon.log();
    assert!(log.contains("models.toml:5"), "{log}");
    assert!(log.contains("anthropic.solo.inputs"), "{log}");
    assert_eq!(cost(&app.run("solo", "go").await), 300.0);

    app.write("config/models.toml", &table("3"));
    app.get_until("/agents/solo", |got| !got.text.contains("ends on"))
        .await;
    assert_eq!(cost(&app.run("solo", "go").await), 450.0);
}

#[tokio::test]
async fn a_file_of_models_that_is_broken_or_missing_stops_the_start() {
    let home = tempfile::tempdir().expect("a directory");
    let write = |name: &str, text: &str| std::fs::write(home.path().join(name), text);
    write("axed.toml", "[models]\nfile = \"models.toml\"\n").expect("a file");
    let start = async || {
        let arguments = ["serve", "--config", "axed.toml", "--listen", "127.0.0.1:0"];
        let output = axed_command(home.path(), &arguments).output().await;
        let output = output.expect("a finished process");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{text}");
        text
    };
    let text = start().await;
    for part in ["axed.toml:2:1: models.file", "models.toml", "No such file"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    write("models.toml", "[openai.\"new\"]\ninput = 1\n").expect("a file");
    let text = start().await;
    for part in ["models.toml:1", "openai.new.output is required"] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[tokio::test]
async fn an_old_table_is_named_at_the_start_and_by_axed_models() {
    for (days, is_old) in [(95, true), (85, false)] {
        let day = day_in(-days);
        let app = TestApp::setup()
            .config("[models]\nfile = \"models.toml\"")
            .file("config/models.toml", &format!("as_of = {day}\n"))
            .spawn()
            .await;
        if is_old {
            app.daemon.wait_for_log("was last checked on").await;
        }
        let printed = axed(&app, &["models", "solo"]).await;
        let printed = String::from_utf8_lossy(&printed.stderr).into_owned();
        let expected = format!("was last checked on {day}");
        for text in [&app.daemon.log(), &printed] {
            assert_eq!(text.contains(&expected), is_old, "{text}");
        }
        let json = axed(&app, &["models", "--json"]).await;
        let json: Value = serde_json::from_slice(&json.stdout).expect("JSON");
        assert_eq!(json["as_of"], day);
    }
}

#[tokio::test]
async fn the_check_the_start_and_each_run_warn_of_a_near_end() {
    let [near, past, far] = [55, -5, 65].map(day_in);
    let row = |name: &str, day: &str| {
        format!(
            "[providers.anthropic.models.\"{name}\"]\nretires = {day}\nsuccessor = \"{name}-2\"\n"
        )
    };
    let app = TestApp::setup()
        .config(&(row("near", &near) + &row("past", &past) + &row("far", &far)))
        .agent("near", "")
        .agent("past", "")
        .agent("far", "fallback_models = [\"anthropic/near\"]")
        .spawn()
        .await;
    let near = format!("anthropic/near ends on {near}: use anthropic/near-2");
    let past = format!("anthropic/past ended on {past}: use anthropic/past-2");
    let expected = [
        format!("model: {near}"),
        format!("model: {past}"),
        format!("fallback_models: {near}"),
    ];
    for text in &expected {
        app.daemon.wait_for_log(text).await;
    }
    let log = app.daemon.log();
    let check = axed(&app, &["agents", "check"]).await;
    let check = String::from_utf8_lossy(&check.stderr).into_owned()
        + &String::from_utf8_lossy(&check.stdout);
    for text in [&log, &check] {
        for expected in &expected {
            assert!(text.contains(expected), "{expected} in {text}");
        }
        assert!(!text.contains("anthropic/far ends"), "{text}");
    }
    for (agent, expected) in [("near", Some(&near)), ("past", Some(&past)), ("far", None)] {
        app.provider.always(agent, |_| says("done"));
        let run = app.run(agent, "go").await;
        assert_eq!(run.output(), "done");
        let messages = run["warnings"].as_array().expect("warnings");
        let messages = messages.iter().filter_map(|it| it["message"].as_str());
        let messages: Vec<&str> = messages.collect();
        let expected: Vec<&str> = expected.map(String::as_str).into_iter().collect();
        assert_eq!(messages, expected, "{agent}");
        let input = json!({"input": "go"});
        let plan = app.post(&format!("/agents/{agent}/dry-run"), &input).await;
        let is_named = plan.text.contains("model_ends");
        assert_eq!(is_named, !expected.is_empty(), "{}", plan.text);
    }
}

#[tokio::test]
async fn every_key_of_the_table_can_be_overridden() {
    let keys = r#"
input = 1.5
output = 2.5
cache_read = 0.5
cache_write = 3
cache_write_1h = 4
long = { above = 1000, input = 5, output = 6, cache_read = 1 }
prices = [{ from = "2999-01-01", input = 7, output = 8 }]
batch = 0.25
flex = 0.75
priority = 3
ultrafast = 5
regional = 1.5
context_window = 4000
max_input = 3000
max_output = 500
images = false
pdf = false
reasoning = false
effort = ["low", "max"]
sampling = "without_effort"
structured_output = false
adaptive_thinking = false
forced_tools = true
responses = true
retires = "2999-12-31"
successor = "next"
checked = "2026-11-01"
"#;
    let expected = json!({
        "provider": "anthropic", "model": "claude-sonnet-5-5", "input": 1.5, "output": 2.5,
        "cache_read": 0.5, "cache_write": 3.0, "cache_write_1h": 4.0, "batch": 0.25, "flex": 0.75,
        "priority": 3.0, "ultrafast": 5.0, "regional": 1.5, "context_window": 4000,
        "max_input": 3000, "max_output": 500, "images": false, "pdf": false, "reasoning": false,
        "effort": ["low", "max"], "sampling": "without_effort", "structured_output": false,
        "adaptive_thinking": false, "forced_tools": true, "responses": true,
        "retires": "2999-12-31", "successor": "next", "checked": "2026-11-01",
    });
    let section = "providers.anthropic.models.\"claude-sonnet-5-5\"";
    for (config, file) in [
        (format!("[{section}]{keys}"), String::new()),
        (
            "[models]\nfile = \"models.toml\"\n".to_owned(),
            format!("[anthropic.\"claude-sonnet-5-5\"]{keys}"),
        ),
    ] {
        let home = tempfile::tempdir().expect("a directory");
        let write = |name: &str, text: &str| std::fs::write(home.path().join(name), text);
        write("axed.toml", &config).expect("a file");
        write("models.toml", &file).expect("a file");
        let models = ["models", "--config", "axed.toml", "sonnet-5-5"];
        let print = async |arguments: &[&str]| {
            let all = [&models, arguments].concat();
            let output = axed_command(home.path(), &all).output().await;
            let output = output.expect("a finished process");
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{stderr}");
            output.stdout
        };
        let table = String::from_utf8(print(&[]).await).expect("text");
        assert!(table.contains("2999-12-31, then next"), "{table}");
        let printed: Value = serde_json::from_slice(&print(&["--json"]).await).expect("JSON");
        let row = &printed["data"][0];
        for (key, value) in expected.as_object().expect("an object") {
            assert_eq!(&row[key], value, "{key} of {config}");
        }
        assert_eq!(row["long"]["above"], 1000);
        assert_eq!(row["prices"][0]["from"], "2999-01-01");
        assert_eq!(row["prices"][0]["input"], 7.0);
    }
}

/// A token costs a millionth of a dollar, or as much as the keys say.
fn priced(provider: &str, keys: &str) -> String {
    format!("[providers.{provider}.models.\"m\"]\ninput = 1\noutput = 1\n{keys}\n")
}

#[tokio::test]
async fn a_price_holds_from_its_day_on() {
    let prices = |first: i64, second: i64| {
        format!(
            "prices = [{{ from = \"{}\", input = 5, output = 5 }}, {{ from = \"{}\", input = 2, output = 2 }}]",
            day_in(second),
            day_in(first)
        )
    };
    // The test also holds at midnight.
    for (first, second, factor) in [(20, 30, 1.0), (-20, 20, 2.0), (-20, -10, 5.0)] {
        let app = TestApp::setup()
            .config(&priced("anthropic", &prices(first, second)))
            .agent("solo", "model = \"anthropic/m\"")
            .spawn()
            .await;
        app.provider
            .always("m", |_| says("done").with_usage(100, 100));
        let run = app.run("solo", "go").await;
        assert_eq!(cost(&run), 200.0 * factor);
    }
}

#[tokio::test]
async fn a_tier_that_only_extra_keys_request_is_priced_or_refused() {
    let app = TestApp::setup()
        .config(&priced("openai", "priority = 2\nultrafast = 3"))
        .agent(
            "solo",
            "model = \"openai/m\"\nallow_extra = [\"service_tier\", \"user\"]",
        )
        .spawn()
        .await;
    app.provider
        .always("m", |_| says("done").with_usage(100, 100));
    let with = |extra: Value| json!({"params": {"extra": extra}});
    for (tier, factor, codes) in [
        ("default", 1.0, &[][..]),
        ("flex", 0.5, &[]),
        ("priority", 2.0, &[]),
        ("ultrafast", 3.0, &[]),
        ("someday", 1.0, &["price_unknown"]),
    ] {
        for stream in [false, true] {
            let mut body = with(json!({"service_tier": tier}));
            body["stream"] = stream.into();
            let run = app.run_with("solo", body).await;
            assert_eq!(cost(&run), 200.0 * factor, "{tier}");
            assert_eq!(warning_codes(&run), codes, "{tier}");
        }
    }
    // The reply decides.
    app.provider.will(
        "m",
        [says("done").with_usage(100, 100).with_tier("default")],
    );
    let run = app
        .run_with("solo", with(json!({"service_tier": "priority"})))
        .await;
    assert_eq!(cost(&run), 200.0);

    let mut limited = with(json!({"service_tier": "someday"}));
    limited["budget"] = json!({"max_cost_usd": 1});
    let refused = app.post("/agents/solo/runs", &limited).await;
    let why = refused.problem(422);
    assert!(why.contains("service tier is not known"), "{why}");
    assert_eq!(refused.json()["errors"][0]["pointer"], "/params/extra");
    for extra in [json!({"service_tier": "priority"}), json!({"user": "ada"})] {
        let mut limited = with(extra);
        limited["budget"] = json!({"max_cost_usd": 1});
        assert_eq!(app.run_with("solo", limited).await.output(), "done");
    }
}

#[tokio::test]
async fn fast_mode_and_regions_of_anthropic_are_priced() {
    let app = TestApp::setup()
        .config(&priced("anthropic", "priority = 6\nregional = 1.25"))
        .agent(
            "solo",
            "model = \"anthropic/m\"\nallow_extra = [\"speed\", \"inference_geo\"]",
        )
        .spawn()
        .await;
    let reply = |usage: Value| {
        let mut usage = usage;
        usage["input_tokens"] = 100.into();
        usage["output_tokens"] = 100.into();
        let body = json!({
            "id": "msg_1", "type": "message", "role": "assistant", "model": "m",
            "content": [{"type": "text", "text": "done"}], "stop_reason": "end_turn",
            "stop_sequence": null, "usage": usage,
        });
        raw(200, "application/json", body.to_string())
    };
    for (extra, usage, factor) in [
        (json!({}), json!({}), 1.0),
        (json!({"speed": "fast"}), json!({}), 6.0),
        (
            json!({"speed": "fast"}),
            json!({"speed": "standard", "service_tier": "standard"}),
            1.0,
        ),
        (json!({"inference_geo": "us"}), json!({}), 1.25),
        (
            json!({"inference_geo": "global"}),
            json!({"inference_geo": "not_available"}),
            1.0,
        ),
        (json!({}), json!({"inference_geo": "us"}), 1.25),
        (
            json!({"speed": "fast", "inference_geo": "us"}),
            json!({"speed": "fast", "inference_geo": "us"}),
            7.5,
        ),
    ] {
        app.provider.will("m", [reply(usage.clone())]);
        let body = json!({"stream": false, "params": {"extra": extra}});
        let run = app.run_with("solo", body).await;
        assert_eq!(cost(&run), 200.0 * factor, "{extra} {usage}");
        assert!(warning_codes(&run).is_empty());
    }
}
