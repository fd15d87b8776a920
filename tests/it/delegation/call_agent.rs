//! `call_agent`: its definition, the child's input, its result, and the depth.

use serde_json::json;

use crate::support::app::TestApp;
use crate::support::gate::Gate;
use crate::support::provider::answer::{calls, delegates, fails, hangs, says};

/// What a parent reads of a child that failed.
fn failed(agent: &str, why: &str) -> String {
    format!(
        "Error: sub-agent \"{agent}\" failed - {why}. You may retry or proceed without this result."
    )
}

#[tokio::test]
async fn a_child_gets_its_task_and_returns_its_final_text() {
    let app = TestApp::setup()
        .agent(
            "planner",
            "system_prompt = \"Plan.\"\nsub_agents = [\"reader\"]",
        )
        .agent(
            "reader",
            "model = \"openai/reader\"\nsystem_prompt = \"Read.\"",
        )
        .spawn()
        .await;
    let ask = json!({"agent": "reader", "task": "read it", "context": "chapter one"});
    app.provider.will(
        "planner",
        [
            calls([("call_agent", ask)]).with_text("Let me ask."),
            says("done"),
        ],
    );
    app.provider.will("reader", [says("a summary")]);

    let run = app.run("planner", "the secret plan").await;

    assert_eq!(run.output(), "done");
    let sent = app.provider.wait_for_request("reader", 1).await;
    assert_eq!(sent.system(), "Read.");
    assert_eq!(
        sent.user_messages(),
        ["Task: read it\n\nContext:\nchapter one"]
    );
    assert_eq!(sent.api_key(), Some("key-of-openai"));
    assert!(!sent.body.to_string().contains("secret plan"), "{sent:?}");
    let reported = app.provider.wait_for_request("planner", 2).await;
    assert_eq!(reported.tool_results(), ["a summary"]);
    assert_eq!(reported.tool_result_errors(), [false]);
    assert_eq!(reported.api_key(), Some("key-of-anthropic"));

    let children = run.children().await;
    let [child] = children.as_slice() else {
        panic!("one child: {children:?}")
    };
    assert_eq!(child["agent"], "reader");
    assert_eq!(child["parent_id"], run["id"]);
    assert_eq!(child["root_id"], run["id"]);
    assert_eq!(child["depth"], 1);
    assert_eq!(child["tool_call_id"], "call_0_0");
    assert_eq!(child["input"], "Task: read it\n\nContext:\nchapter one");
    assert_eq!(child.output(), "a summary");
    assert_eq!(run["parent_id"], json!(null));
    assert_eq!(run["root_id"], run["id"]);
    assert_eq!(run["depth"], 0);
    assert_eq!(run["tree"]["runs"], 2);
    assert_eq!(run["turns"], 2);
}

#[tokio::test]
async fn a_blank_context_is_left_out() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    let ask = json!({"agent": "reader", "task": "read it", "context": " \n"});
    app.provider
        .will("planner", [calls([("call_agent", ask)]), says("done")]);
    app.provider.will("reader", [says("a summary")]);

    app.run("planner", "go").await;

    let sent = app.provider.wait_for_request("reader", 1).await;
    assert_eq!(sent.user_messages(), ["Task: read it"]);
    assert_eq!(sent.system(), "");
}

#[tokio::test]
async fn the_tools_definition_matches_the_contract() {
    let app = TestApp::setup()
        .agent(
            "planner",
            "sub_agents = [\"writer\", \"reader\", \"writer\"]",
        )
        .agent("boss", "sub_agents = [\"reader\", \"expert\"]")
        .agent("expert", "description = \"Knows law.\"")
        .agent("reader", "")
        .agent("writer", "")
        .spawn()
        .await;
    app.provider.will("planner", [says("done")]);
    app.provider.will("boss", [says("done")]);

    app.run("planner", "go").await;
    app.run("boss", "go").await;

    let tools = app.provider.wait_for_request("planner", 1).await.tools();
    assert_eq!(tools.len(), 1, "{tools:?}");
    assert_eq!(tools[0]["name"], "call_agent");
    assert_eq!(
        tools[0]["description"],
        "Delegate a task to a sub-agent. The sub-agent runs independently with its own context and returns only its \
         final result. Available agents: writer, reader"
    );
    let parameters = &tools[0]["parameters"];
    assert_eq!(parameters["type"], "object");
    assert_eq!(parameters["required"], json!(["agent", "task"]));
    assert_eq!(
        parameters["properties"],
        json!({
            "agent": {
                "type": "string",
                "description": "Name of the sub-agent to invoke (must be one of: writer, reader)",
                "enum": ["writer", "reader"],
            },
            "task": {
                "type": "string",
                "description": "What you need the sub-agent to do",
            },
            "context": {
                "type": "string",
                "description": "Additional context from your conversation to pass along",
            },
        })
    );

    let tools = app.provider.wait_for_request("boss", 1).await.tools();
    let description = tools[0]["description"].as_str().expect("a description");
    assert!(
        description.contains("Available agents: reader, expert"),
        "{description}"
    );
    assert!(description.contains("Knows law."), "{description}");
}

#[tokio::test]
async fn an_invalid_call_gets_an_error_result() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .agent("stranger", "")
        .spawn()
        .await;
    let wrong = [
        json!({"agent": " ", "task": ""}),
        json!({"task": "read"}),
        json!({"agent": "reader", "task": "\t"}),
        json!({"agent": "stranger"}),
        json!({"agent": "stranger", "task": "read"}),
    ];
    app.provider.will(
        "planner",
        [calls(wrong.map(|ask| ("call_agent", ask))), says("done")],
    );

    let run = app.run("planner", "go").await;

    assert_eq!(run.output(), "done");
    let reported = app.provider.wait_for_request("planner", 2).await;
    assert_eq!(
        reported.tool_results(),
        [
            "call_agent error: \"agent\" argument is required",
            "call_agent error: \"agent\" argument is required",
            "call_agent error: \"task\" argument is required",
            "call_agent error: \"task\" argument is required",
            "call_agent error: agent \"stranger\" is not in this agent's sub_agents list",
        ]
    );
    assert_eq!(reported.tool_result_errors(), [true; 5]);
    assert_eq!(run["tool_calls"], 5);
    assert_eq!(run["tree"]["runs"], 1);
}

#[tokio::test]
async fn a_child_that_cannot_start_is_an_error_result() {
    let names = [
        "ghost",
        "broken",
        "odd",
        "unskilled",
        "full",
        "lost",
        "nowhere",
        "keyless",
    ];
    let app = TestApp::setup()
        .config("[providers.private]\nkind = \"anthropic\"\nbase_url = \"{provider}\"")
        .config("[limits]\ncontext_files = 16")
        .agent("planner", &format!("sub_agents = {names:?}"))
        .file("agents/broken.toml", "name = \"broken\"\n")
        .agent("odd", "model = \"gpt\"")
        .agent("unskilled", "skill = \"juggling\"")
        .agent("full", "workdir = \"work\"\nfiles = [\"*.md\"]")
        .file("work/long.md", "more than sixteen bytes of text")
        .agent("lost", "workdir = \"no/such/place\"")
        .agent("nowhere", "model = \"nobody/knows\"")
        .agent("keyless", "model = \"private/model\"")
        .spawn()
        .await;
    let tasks = names.map(|agent| ("call_agent", json!({"agent": agent, "task": "work"})));
    app.provider.will("planner", [calls(tasks), says("done")]);

    let run = app.run("planner", "go").await;

    assert_eq!(run.output(), "done");
    let reported = app.provider.wait_for_request("planner", 2).await;
    assert_eq!(reported.tool_result_errors(), [true; 8]);
    let results = reported.tool_results();
    assert_eq!(
        results[0],
        failed(
            "ghost",
            "failed to load agent \"ghost\": agent config not found: ghost"
        )
    );
    assert_eq!(
        results[2],
        failed(
            "odd",
            "invalid model for agent \"odd\": invalid model format \"gpt\": expected provider/model-name"
        )
    );
    assert_eq!(
        results[7],
        failed(
            "keyless",
            "API key for provider \"private\" is not configured (set PRIVATE_API_KEY or add to config.toml); in config/axed.toml it is api_key in [providers.private]"
        )
    );
    let starts = [
        (1, "failed to load agent \"broken\": "),
        (
            3,
            "failed to load skill for agent \"unskilled\": skill not found: ",
        ),
        (4, "failed to resolve files for agent \"full\": "),
        (5, "invalid workdir for agent \"lost\": "),
        (
            6,
            "unsupported provider \"nobody\": supported providers are anthropic, openai, ollama",
        ),
    ];
    for (at, why) in starts {
        let start = format!("Error: sub-agent \"{}\" failed - {why}", names[at]);
        assert!(results[at].starts_with(&start), "{}", results[at]);
        let end = ". You may retry or proceed without this result.";
        assert!(results[at].ends_with(end), "{}", results[at]);
    }
    assert!(
        results[1].contains("agent config missing required field: model"),
        "{}",
        results[1]
    );
}

#[tokio::test]
async fn a_child_that_fails_is_an_error_result() {
    let app = TestApp::setup()
        .agent(
            "planner",
            "sub_agents = [\"refused\", \"endless\", \"greedy\"]",
        )
        .agent("refused", "")
        .agent(
            "endless",
            "sub_agents = [\"refused\"]\n[limits]\nmax_turns = 1",
        )
        .agent(
            "greedy",
            "sub_agents = [\"refused\"]\n[budget]\nmax_tokens = 10",
        )
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [
            delegates([("refused", "a"), ("endless", "b"), ("greedy", "c")]),
            says("done"),
        ],
    );
    app.provider.will("refused", [fails(401, "no such key")]);
    app.provider
        .will("endless", [delegates([("refused", "again")])]);
    app.provider.will(
        "greedy",
        [delegates([("refused", "again")]).with_usage(15, 5)],
    );

    let run = app.run("planner", "go").await;

    assert_eq!(run.output(), "done");
    let reported = app.provider.wait_for_request("planner", 2).await;
    assert_eq!(
        reported.tool_results(),
        [
            failed("refused", "auth: no such key (anthropic/refused)"),
            failed(
                "endless",
                "sub-agent exceeded maximum conversation turns (1)"
            ),
            failed("greedy", "budget exceeded: used 20 of 10 tokens"),
        ]
    );
    assert_eq!(reported.tool_result_errors(), [true; 3]);
    let children = run.children().await;
    let codes: Vec<_> = children.iter().map(|child| child.failure().0).collect();
    assert_eq!(codes, ["provider_auth", "max_turns", "budget_exceeded"]);
}

#[tokio::test]
async fn children_of_one_reply_run_in_parallel_and_return_in_call_order() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"one\", \"two\", \"three\"]")
        .agent("one", "")
        .agent("two", "")
        .agent("three", "")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [
            delegates([("one", "1"), ("two", "2"), ("three", "3")]),
            says("done"),
        ],
    );
    let gates = ["one", "two", "three"].map(|agent| {
        let gate = Gate::closed();
        let answer = says(format!("from {agent}")).after_gate(&gate);
        app.provider.will(agent, [answer]);
        gate
    });

    let run = app.start("planner", "go").await;
    let mut events = app.events(&run).await;
    for agent in ["one", "two", "three"] {
        app.provider.wait_for_concurrency(agent, 1).await;
    }
    // The last is let go first, and each has ended before the next may.
    for gate in gates.iter().rev() {
        gate.open();
        events.until("run.completed").await;
    }

    assert_eq!(run.wait_for_end().await.output(), "done");
    assert_eq!(
        app.provider
            .wait_for_request("planner", 2)
            .await
            .tool_results(),
        ["from one", "from two", "from three"]
    );
    let names: Vec<_> = run
        .children()
        .await
        .iter()
        .map(|child| child["agent"].clone())
        .collect();
    assert_eq!(names, ["one", "two", "three"]);
}

#[tokio::test]
async fn without_parallel_children_run_one_after_another() {
    let app = TestApp::setup()
        .agent(
            "planner",
            "sub_agents = [\"reader\"]\n[sub_agents_config]\nparallel = false",
        )
        .agent("reader", "")
        .spawn()
        .await;
    let tasks = [("reader", "1"), ("reader", "2"), ("reader", "3")];
    app.provider
        .will("planner", [delegates(tasks), says("done")]);
    app.provider
        .always("reader", |seen| says(seen.user_messages()[0].clone()));

    app.run("planner", "go").await;

    assert_eq!(app.provider.max_concurrency("reader"), 1);
    assert_eq!(
        app.provider
            .wait_for_request("planner", 2)
            .await
            .tool_results(),
        ["Task: 1", "Task: 2", "Task: 3"]
    );
}

#[tokio::test]
async fn max_concurrent_bounds_the_children_of_one_reply() {
    let app = TestApp::setup()
        .agent(
            "planner",
            "sub_agents = [\"reader\"]\n[sub_agents_config]\nmax_concurrent = 2",
        )
        .agent("reader", "")
        .spawn()
        .await;
    let tasks = [
        ("reader", "1"),
        ("reader", "2"),
        ("reader", "3"),
        ("reader", "4"),
    ];
    app.provider
        .will("planner", [delegates(tasks), says("done")]);
    let gate = Gate::closed();
    let door = gate.clone();
    app.provider.always("reader", move |seen| {
        says(seen.user_messages()[0].clone()).after_gate(&door)
    });

    let run = app.start("planner", "go").await;
    app.provider.wait_for_concurrency("reader", 2).await;
    gate.open();

    assert_eq!(run.wait_for_end().await.output(), "done");
    assert_eq!(app.provider.max_concurrency("reader"), 2);
    assert_eq!(app.provider.requests_for("reader").len(), 4);
}

#[tokio::test]
async fn nested_parents_run_their_children_in_parallel_too() {
    let app = TestApp::setup()
        .agent("root", "sub_agents = [\"middle\"]")
        .agent("middle", "sub_agents = [\"leaf\"]")
        .agent("leaf", "")
        .spawn()
        .await;
    app.provider.will(
        "root",
        [delegates([("middle", "l"), ("middle", "r")]), says("done")],
    );
    app.provider.always("middle", |seen| {
        if seen.tool_results().is_empty() {
            delegates([("leaf", "1"), ("leaf", "2")])
        } else {
            says(seen.tool_results().join("+"))
        }
    });
    let gate = Gate::closed();
    let door = gate.clone();
    app.provider
        .always("leaf", move |_| says("leaf").after_gate(&door));

    let run = app.start("root", "go").await;
    app.provider.wait_for_concurrency("leaf", 4).await;
    gate.open();

    let run = run.wait_for_end().await;
    assert_eq!(run.output(), "done");
    assert_eq!(
        app.provider
            .wait_for_request("root", 2)
            .await
            .tool_results(),
        ["leaf+leaf", "leaf+leaf"]
    );
    assert_eq!(run["tree"]["runs"], 7);
    let tree = run.tree().await;
    for middle in tree["children"].as_array().expect("children") {
        assert_eq!(
            middle["children"].as_array().map(Vec::len),
            Some(2),
            "{tree}"
        );
        assert_eq!(middle["children"][0]["depth"], 2);
    }
}

#[tokio::test]
async fn one_failing_child_does_not_affect_the_others() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"good\", \"bad\"]")
        .agent("good", "")
        .agent("bad", "")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [delegates([("bad", "x"), ("good", "y")]), says("done")],
    );
    app.provider.will("bad", [fails(400, "nonsense")]);
    let gate = Gate::closed();
    app.provider.will("good", [says("fine").after_gate(&gate)]);

    let run = app.start("planner", "go").await;
    app.events(&run).await.until("run.failed").await;
    gate.open();

    assert_eq!(run.wait_for_end().await.output(), "done");
    let reported = app.provider.wait_for_request("planner", 2).await;
    assert_eq!(
        reported.tool_results(),
        [
            failed("bad", "bad_request: nonsense (anthropic/bad)"),
            "fine".to_owned()
        ]
    );
    assert_eq!(reported.tool_result_errors(), [true, false]);
}

#[tokio::test]
async fn a_child_cancelled_alone_is_an_error_result() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"slow\"]")
        .agent("slow", "")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [delegates([("slow", "wait")]), says("without it")],
    );
    app.provider.will("slow", [hangs()]);

    let run = app.start("planner", "go").await;
    app.provider.wait_for_concurrency("slow", 1).await;
    let children = run.wait_for_children(1).await;
    let cancelled = children[0].cancel("not needed").await;
    assert_eq!(cancelled.status(), "cancelled");
    assert_eq!(cancelled["cancel_reason"], "not needed");

    assert_eq!(run.wait_for_end().await.output(), "without it");
    let reported = app.provider.wait_for_request("planner", 2).await;
    assert_eq!(
        reported.tool_results(),
        [failed("slow", "cancelled: not needed")]
    );
    assert_eq!(reported.tool_result_errors(), [true]);
}
