//! Ad-hoc delegation: unnamed agents with their caller's model, prompt and tools, within quotas of the whole tree.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::events::{assert_complete, count, kinds};
use crate::support::provider::answer::{calls, delegates, fails, hangs, says};
use crate::support::provider::recorded_request::{RecordedRequest, Wire};
use crate::support::run::Run;

const ON: &str = "[subagent]\nenabled = true";

fn task(task: &str) -> (&'static str, Value) {
    ("subagent", json!({"label": "look", "task_prompt": task}))
}

fn reported(seen: &RecordedRequest) -> String {
    seen.tool_results().remove(0)
}

/// Tools by name that a request offers.
fn offered(seen: &RecordedRequest) -> Vec<String> {
    let name = |tool: &Value| {
        let name = tool.get("name").or_else(|| tool["function"].get("name"));
        name.and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    seen.tools().iter().map(name).collect()
}

async fn turns(run: &Run<'_>) -> Vec<Value> {
    let list = run.get("/turns").await.json();
    list["data"].as_array().expect("a list").clone()
}

#[tokio::test]
async fn an_ad_hoc_agent_works_on_its_task_with_its_callers_tools() {
    let agent = format!(
        "system_prompt = \"Work.\"\nsub_agents = [\"reader\"]\n[params]\ntemperature = 0.5\n{ON}"
    );
    let app = TestApp::setup().agent("planner", &agent).spawn().await;
    app.provider
        .always("planner", |seen| match seen.user_messages()[0].as_str() {
            "look around" => says("it is quiet").with_usage(20, 2),
            _ if seen.tool_results().is_empty() => calls([task("look around")]).with_usage(10, 1),
            _ => says("done").with_usage(30, 3),
        });

    let run = app.run("planner", "go").await;

    assert_eq!(run.output(), "done");
    assert_eq!((run.usage(), run.tree_usage()), ((40, 4, 1), (60, 6, 1)));
    let child = run.children().await.remove(0);
    assert_eq!(child["agent"], "planner");
    assert_eq!(child["label"], "look");
    assert_eq!(child["completion_status"], "complete");
    assert_eq!((&child["depth"], &child["turns"]), (&json!(1), &json!(1)));
    assert_eq!(child.output(), "it is quiet");
    let seen = app.provider.requests();
    assert_eq!(seen[1].system(), "Work.");
    assert_eq!(seen[1].user_messages(), ["look around"]);
    assert_eq!(seen[1].body["temperature"], 0.5);
    assert_eq!(offered(&seen[0]), ["call_agent", "subagent"]);
    assert_eq!(offered(&seen[1]), ["call_agent", "subagent"]);
    assert_eq!(reported(&seen[2]), "it is quiet");
    let tree = run.tree().await;
    assert_eq!(tree["children"][0]["task"], "look around");
    let events = run.events().await;
    assert_complete(&events);
    for kind in [
        "tool.started",
        "agent.called",
        "agent.returned",
        "tool.completed",
    ] {
        assert_eq!(count(&events, kind), 1, "{kind}");
    }
}

#[tokio::test]
async fn only_the_allow_list_decides() {
    let app = TestApp::setup()
        .agent("planner", &format!("sub_agents = [\"reader\"]\n{ON}"))
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [
            calls([(
                "subagent",
                json!({"label": "a", "task_prompt": "x", "allowed_tools": ["call_agent"]}),
            )]),
            calls([task("nested")]),
            says("child"),
            calls([(
                "subagent",
                json!({"label": "b", "task_prompt": "y", "allowed_tools": []}),
            )]),
            says("bare"),
            calls([(
                "subagent",
                json!({"label": "c", "task_prompt": "z", "allowed_tools": ["fly"]}),
            )]),
            says("done"),
        ],
    );

    let run = app.run("planner", "go").await;

    assert_eq!(run.output(), "done");
    let seen = app.provider.requests();
    assert_eq!(offered(&seen[1]), ["call_agent"]);
    assert_eq!(reported(&seen[2]), "Unknown tool: \"subagent\"");
    assert!(offered(&seen[4]).is_empty());
    assert_eq!(
        seen[6].tool_results().last().map(String::as_str),
        Some("Unknown tool in allowed_tools: fly")
    );
}

#[tokio::test]
async fn a_summary_is_an_uncounted_turn_without_tools() {
    for wire in Wire::ALL {
        let model = wire.name();
        let agent = format!(
            "model = \"{model}/planner\"\nsub_agents = [\"nobody\"]\n{ON}\nsummary = \"always\""
        );
        let app = TestApp::setup().agent("planner", &agent).spawn().await;
        app.provider.will(
            "planner",
            [
                calls([task("look around")]).with_usage(1, 1),
                delegates([("nobody", "x")]).with_usage(2, 1),
                says("a long story").with_usage(4, 1),
                says("in short: quiet").with_usage(8, 1),
                says("done").with_usage(16, 1),
            ],
        );

        let run = app.run("planner", "go").await;

        assert_eq!(run.output(), "done", "{wire:?}");
        assert_eq!(run.tree_usage(), (31, 5, 2));
        let seen = app.provider.requests();
        assert!(seen[3].tools().is_empty(), "{:?}", seen[3].body);
        assert_eq!(
            seen[3].user_messages().last().map(String::as_str),
            Some("Summarize your findings concisely")
        );
        assert_eq!(reported(&seen[4]), "in short: quiet");
        let child = run.children().await.remove(0);
        assert_eq!(
            (child.output(), &child["turns"]),
            ("in short: quiet", &json!(2))
        );
        let turns = turns(&child).await;
        let inputs = turns
            .iter()
            .map(|turn| turn["usage"]["input_tokens"].as_u64());
        assert_eq!(inputs.collect::<Vec<_>>(), [Some(2), Some(4), Some(8)]);
        assert_eq!(child.usage().0, 14);
        assert_complete(&run.events().await);
    }
}

#[tokio::test]
async fn a_failed_summary_keeps_the_tasks_text() {
    let app = TestApp::setup()
        .agent("planner", &format!("{ON}\n[retry]\nmax_retries = 0"))
        .spawn()
        .await;
    let summing = json!({"label": "a", "task_prompt": "x", "summary_prompt": "In three words?"});
    app.provider.will(
        "planner",
        [
            calls([("subagent", summing)]),
            says("the long story"),
            fails(400, "not today"),
            says("done"),
        ],
    );

    let run = app.run("planner", "go").await;

    assert_eq!(run.output(), "done");
    let seen = app.provider.requests();
    assert_eq!(
        seen[2].user_messages().last().map(String::as_str),
        Some("In three words?")
    );
    assert_eq!(reported(&seen[3]), "the long story");
    let child = run.children().await.remove(0);
    assert_eq!(child.output(), "the long story");
    let turns = turns(&child).await;
    assert_eq!(turns.len(), 2);
    assert_eq!(turns[1]["status"], "failed");
    let error = turns[1]["attempts"][0]["error"].as_str().expect("a text");
    let warning = &child["warnings"][0];
    assert_eq!(
        (&warning["code"], &warning["turn"]),
        (&json!("not_summarized"), &json!(2))
    );
    let message = warning["message"].as_str().expect("a text");
    for text in [error, message] {
        assert!(text.contains("not today"), "{text}");
    }
}

#[tokio::test]
async fn a_task_out_of_turns_returns_its_last_text() {
    let app = TestApp::setup()
        .agent("planner", &format!("sub_agents = [\"nobody\"]\n{ON}"))
        .spawn()
        .await;
    let short = json!({"label": "a", "task_prompt": "x", "max_turns": 1});
    app.provider.will(
        "planner",
        [
            calls([("subagent", short)]),
            delegates([("nobody", "y")]).with_text("so far so good"),
            says("done"),
        ],
    );

    let run = app.run("planner", "go").await;

    let result = reported(app.provider.wait_for_request("planner", 3).await.as_ref());
    assert!(
        result.contains("incomplete") && result.ends_with("so far so good"),
        "{result}"
    );
    let child = run.children().await.remove(0);
    assert_eq!(child.output(), "so far so good");
    assert_eq!(child["completion_status"], "incomplete");
    let events = run.events().await;
    let mut done = events
        .iter()
        .filter(|event| event["type"] == "tool.completed");
    assert!(
        done.next_back()
            .is_some_and(|event| event["is_error"] == false)
    );
}

#[tokio::test]
async fn quotas_apply_to_parallel_calls() {
    let app = TestApp::setup()
        .agent("planner", &format!("{ON}\nmax_executions = 2"))
        .spawn()
        .await;
    app.provider
        .always("planner", |seen| match seen.user_messages()[0].as_str() {
            "go" if seen.tool_results().is_empty() => {
                calls((0..5).map(|n| task(&format!("task {n}"))))
            }
            "go" => says("done"),
            task => says(format!("did {task}")),
        });

    let run = app.run("planner", "go").await;

    assert_eq!(run.output(), "done");
    let mut results = app
        .provider
        .requests()
        .last()
        .expect("a request")
        .tool_results();
    results.sort();
    assert_eq!(results.len(), 5);
    let refused = "Resource quota exceeded: Execution limit reached: 2/2";
    assert_eq!(
        results.iter().filter(|text| *text == refused).count(),
        3,
        "{results:?}"
    );
    assert_eq!(run["tree"]["runs"], 3);
}

#[tokio::test]
async fn the_roots_quota_counts_the_ad_hoc_agents_of_the_whole_tree() {
    let app = TestApp::setup()
        .agent(
            "planner",
            &format!("sub_agents = [\"reader\"]\n{ON}\nmax_executions = 2"),
        )
        .agent("reader", ON)
        .spawn()
        .await;
    let two = || calls((0..2).map(|n| task(&format!("task {n}"))));
    app.provider.always("reader", move |seen| {
        let is_reader = seen.user_messages()[0].starts_with("Task: read");
        match seen.tool_results().is_empty() {
            true if is_reader => two(),
            _ => says("read"),
        }
    });
    app.provider.will(
        "planner",
        [delegates([("reader", "read")]), two(), says("done")],
    );

    let run = app.run("planner", "go").await;

    assert_eq!(run.output(), "done");
    let results = app
        .provider
        .requests_for("planner")
        .last()
        .expect("a request")
        .tool_results();
    let refused = "Resource quota exceeded: Execution limit reached: 2/2";
    assert_eq!(results[1..], [refused, refused]);
    assert_eq!(run["tree"]["runs"], 4);
}

#[tokio::test]
async fn tokens_of_ad_hoc_agents_are_bounded_for_the_tree() {
    let app = TestApp::setup()
        .agent("planner", &format!("{ON}\nmax_total_tokens = 100"))
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [
            calls([task("a")]).with_usage(1000, 10),
            says("did a").with_usage(120, 30),
            calls([task("b")]).with_usage(1000, 10),
            says("done"),
        ],
    );

    let run = app.run("planner", "go").await;

    assert_eq!(run.output(), "done");
    let seen = app.provider.requests();
    assert_eq!(reported(&seen[2]), "did a");
    assert_eq!(
        seen[3].tool_results().last().map(String::as_str),
        Some("Resource quota exceeded: Token limit exceeded: 150/100")
    );
}

#[tokio::test]
async fn depth_is_counted_over_the_tree() {
    // Each starts one more below it, until an error reports the limit.
    let descend = |seen: &RecordedRequest| match seen.tool_results().last() {
        None => calls([task("deeper")]),
        Some(result) => says(format!("got: {result}")),
    };
    for (agent, deepest) in [
        (ON.to_owned(), 3),
        (format!("{ON}\nmax_depth = 5"), 5),
        (format!("{ON}\nmax_depth = 1"), 1),
        (
            format!("[sub_agents_config]\nmax_depth = 2\n{ON}\nmax_depth = 5"),
            2,
        ),
        (
            format!("[sub_agents_config]\nmax_depth = 4\n{ON}\nmax_depth = 1"),
            1,
        ),
    ] {
        let app = TestApp::setup().agent("planner", &agent).spawn().await;
        app.provider.always("planner", descend);

        let run = app.run("planner", "go").await;

        let family = run.tree_runs().await;
        assert_eq!(family.len(), deepest + 1, "{agent}");
    }
}

#[tokio::test]
async fn a_caller_at_the_depth_limit_is_informed() {
    // It still has `call_agent`, so that its calls mean something.
    let agent = format!(
        "sub_agents = [\"nobody\"]\n[sub_agents_config]\nmax_depth = 4\n{ON}\nmax_depth = 1"
    );
    let app = TestApp::setup().agent("planner", &agent).spawn().await;
    app.provider.will(
        "planner",
        [
            calls([task("deeper")]),
            calls([task("deeper still")]),
            says("no further"),
            says("done"),
        ],
    );

    assert_eq!(app.run("planner", "go").await.output(), "done");
    let seen = app.provider.requests();
    assert_eq!(offered(&seen[1]), ["call_agent"]);
    assert_eq!(
        reported(&seen[2]),
        "Maximum subagent recursion depth (1) exceeded. Current depth: 1. Cannot spawn nested subagent."
    );
}

#[tokio::test]
async fn failed_tasks_and_long_results_reach_the_caller() {
    let app = TestApp::setup()
        .agent(
            "planner",
            &format!("[retry]\nmax_retries = 0\n{ON}\noutput_max_size = 1024"),
        )
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [
            calls([task("a")]),
            fails(400, "bad words"),
            calls([task("b")]),
            says("ä".repeat(2000)),
            says("done"),
        ],
    );

    let run = app.run("planner", "go").await;

    assert_eq!(run.output(), "done");
    let results = app
        .provider
        .wait_for_request("planner", 5)
        .await
        .tool_results();
    assert!(
        results[0].starts_with("Subagent task execution failed: bad_request: "),
        "{}",
        results[0]
    );
    assert!(results[1].ends_with("ä... (truncated)") && results[1].len() <= 1024);
    let children = run.children().await;
    assert_eq!(
        children[1].output().chars().count(),
        2000,
        "the record has it whole"
    );
}

#[tokio::test]
async fn a_restart_resumes_the_task_and_keeps_the_quota() {
    let mut app = TestApp::setup()
        .agent(
            "planner",
            &format!("{ON}\nmax_executions = 1\nmax_depth = 2"),
        )
        .spawn()
        .await;
    let is_open = Arc::new(AtomicBool::new(false));
    let open = Arc::clone(&is_open);
    app.provider.always("planner", move |seen| {
        let results = seen.tool_results();
        match (seen.user_messages()[0].as_str(), results.len()) {
            ("go", 0) => calls([task("look")]),
            ("go", 1) => calls([task("look again")]),
            ("go", _) => says("done"),
            _ if open.load(Ordering::SeqCst) => says("seen"),
            _ => hangs(),
        }
    });
    let id = app.start("planner", "go").await.id().to_owned();
    app.provider.wait_for_request("planner", 2).await;
    let mut events = app.events(&app.find(&id).await).await;
    events
        .until_matches(|events| count(events, "turn.started") == 2)
        .await;
    is_open.store(true, Ordering::SeqCst);

    app.crash_and_restart().await;

    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "done");
    assert_eq!(run["tree"]["runs"], 2);
    let results = app
        .provider
        .requests()
        .last()
        .expect("a request")
        .tool_results();
    assert_eq!(
        results,
        [
            "seen",
            "Resource quota exceeded: Execution limit reached: 1/1"
        ]
    );
    let child = run.children().await.remove(0);
    assert_eq!(
        (&child["attempt"], &child["completion_status"]),
        (&json!(2), &json!("complete"))
    );
    let events = run.events().await;
    assert_complete(&events);
    assert_eq!(kinds(&events).last(), Some(&"run.completed"));
}

#[tokio::test]
async fn an_interrupted_summary_is_requested_again() {
    let mut app = TestApp::setup()
        .agent("planner", &format!("{ON}\nsummary = \"always\""))
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [
            calls([task("look")]),
            says("a long story"),
            hangs(),
            says("in short"),
            says("done"),
        ],
    );
    let id = app.start("planner", "go").await.id().to_owned();
    app.provider.wait_for_request("planner", 3).await;
    let mut events = app.events(&app.find(&id).await).await;
    events
        .until_matches(|events| count(events, "turn.started") == 3)
        .await;

    app.crash_and_restart().await;

    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "done");
    let seen = app.provider.requests();
    assert_eq!(seen.len(), 5);
    assert_eq!(seen[2].body["messages"], seen[3].body["messages"]);
    let child = run.children().await.remove(0);
    assert_eq!((child.output(), &child["turns"]), ("in short", &json!(1)));
}

#[tokio::test]
async fn errors_in_the_section_are_named() {
    let app = TestApp::setup()
        .agent("deep", &format!("{ON}\nmax_depth = 6"))
        .agent("small", &format!("{ON}\noutput_max_size = 100"))
        .agent("odd", &format!("{ON}\nsummary = \"never\""))
        .agent("model", &format!("{ON}\n model = \"gpt\""))
        .agent("off", "[subagent]\nenabled = false\nmax_depth = 2")
        .spawn()
        .await;
    for (agent, why) in [
        ("deep", "subagent.max_depth"),
        ("small", "subagent.output_max_size"),
        ("odd", "subagent.summary must be one of: on_request, always"),
        ("model", "invalid model format \"gpt\""),
    ] {
        let got = app.post(&format!("/agents/{agent}/runs"), &json!({})).await;
        assert!(got.problem(422).contains(why), "{}", got.text);
    }
    app.provider.will("off", [says("done")]);
    assert_eq!(app.run("off", "go").await.output(), "done");
    assert!(offered(&app.provider.requests()[0]).is_empty());
}

#[tokio::test]
async fn tasks_can_use_another_model() {
    let app = TestApp::setup()
        .agent("planner", &format!("{ON}\n model = \"openai/small\""))
        .spawn()
        .await;
    app.provider
        .will("planner", [calls([task("a")]), says("done")]);
    app.provider.will("small", [says("did a")]);

    assert_eq!(app.run("planner", "go").await.output(), "done");
    assert_eq!(app.provider.requests_for("small").len(), 1);
}
