//! Replies that are no answers: refusals, replies that ended before they had begun, and replies that nobody can read. What
//! they report counts all the same, and what makes no sense in it costs nothing.

use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::events::count;
use crate::support::provider::answer::{ScriptedAnswer, calls, delegates, raw, says};
use crate::support::provider::recorded_request::Wire;

/// An app with an agent for each wire and way, its name and model being `<wire>-<streamed>`.
async fn on_every_wire(more: &str) -> (TestApp, Vec<(Wire, String)>) {
    let mut setup = TestApp::setup().agent("reader", "");
    let mut agents = Vec::new();
    for wire in Wire::ALL {
        for stream in [false, true] {
            let agent = format!("{}-{stream}", wire.name());
            setup = setup.config(&format!(
                "[prices.\"{}/{agent}\"]\ninput = 1.0\noutput = 10.0",
                wire.name()
            ));
            let model = format!("model = \"{}/{agent}\"\nstream = {stream}", wire.name());
            setup = setup.agent(&agent, &format!("{model}\n{more}"));
            agents.push((wire, agent));
        }
    }
    (setup.spawn().await, agents)
}

fn limit(wire: Wire) -> &'static str {
    match wire {
        Wire::Anthropic => "max_tokens",
        Wire::Responses => "max_output_tokens",
        Wire::Openai | Wire::Ollama => "length",
    }
}

#[tokio::test]
async fn a_refusal_fails_the_run_and_is_recorded() {
    let (app, agents) = on_every_wire("fallback_models = [\"anthropic/other\"]").await;
    app.provider.always("other", |_| says("never requested"));
    for (wire, agent) in agents {
        if wire == Wire::Ollama {
            // It has no form for refusals.
            continue;
        }
        app.provider.will(
            &agent,
            [says("I cannot help with that.")
                .with_usage(100, 20)
                .into_refusal()],
        );

        let run = app.run(&agent, "go").await;

        let message = "the model refused to answer: I cannot help with that.";
        assert_eq!(run.failure(), ("refused", message), "{agent}");
        assert_eq!(run["error"]["category"], "agent");
        assert_eq!(run["error"]["retryable"], false);
        assert_eq!(run["partial_content"], "I cannot help with that.");
        assert_eq!(run.usage(), (100, 20, 0), "{agent}");
        assert_eq!(run["tree"]["cost_usd"], 0.0003);
        assert_eq!(run["tree"]["complete"], true);
        assert_eq!(app.provider.requests_for(&agent).len(), 1);
    }
    assert!(app.provider.requests_for("other").is_empty());
}

#[tokio::test]
async fn a_filtered_reply_without_text_is_a_refusal_too() {
    let (app, agents) = on_every_wire("").await;
    for (wire, agent) in agents {
        let reason = match wire {
            Wire::Anthropic => "refusal",
            Wire::Openai | Wire::Responses => "content_filter",
            Wire::Ollama => continue,
        };
        app.provider.will(
            &agent,
            [
                says("").with_usage(100, 20).with_stop_reason(reason),
                delegates([("nobody", "x")])
                    .with_usage(1, 1)
                    .with_stop_reason(reason),
                says("Once upon").with_stop_reason("content_filter"),
            ],
        );

        let run = app.run(&agent, "go").await;

        let message = "the model, or a filter of its service, refused to answer";
        assert_eq!(run.failure(), ("refused", message), "{agent}");
        assert_eq!(run["partial_content"], Value::Null);
        assert_eq!(run.usage(), (100, 20, 0));
    }
}

#[tokio::test]
async fn an_empty_final_reply_ends_the_run_and_its_usage_counts() {
    let (app, agents) = on_every_wire("fallback_models = [\"anthropic/other\"]").await;
    for (wire, agent) in agents {
        app.provider.will(
            &agent,
            [
                says("").with_usage(100, 20).with_stop_reason(limit(wire)),
                says("Once upon")
                    .with_usage(1, 2)
                    .with_stop_reason(limit(wire)),
            ],
        );

        let run = app.run(&agent, "go").await;

        let (code, message) = run.failure();
        assert_eq!(code, "output_truncated", "{agent}: {message}");
        assert!(message.contains("params.max_tokens"), "{message}");
        assert_eq!(run["error"]["category"], "agent");
        assert_eq!(run["error"]["retryable"], false);
        assert_eq!(run["stop_reason"], limit(wire));
        assert_eq!(run.usage(), (100, 20, 0), "{agent}");
        assert_eq!(run["tree"]["cost_usd"], 0.0003);
        assert_eq!(app.provider.requests_for(&agent).len(), 1, "{agent}");

        // Cut, but an answer.
        assert_eq!(app.run(&agent, "go").await.output(), "Once upon");
    }
}

#[tokio::test]
async fn a_childs_refusal_reaches_its_caller_and_counts_in_the_tree() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [
            delegates([("reader", "x")]).with_usage(1, 2),
            says("done").with_usage(4, 8),
        ],
    );
    app.provider
        .will("reader", [says("No.").with_usage(16, 32).into_refusal()]);

    let run = app.run("planner", "go").await;

    assert_eq!(run.output(), "done");
    let result = app
        .provider
        .wait_for_request("planner", 2)
        .await
        .tool_results()
        .remove(0);
    assert!(
        result.contains("the model refused to answer: No."),
        "{result}"
    );
    assert_eq!(run.tree_usage(), (21, 42, 1));
}

/// An unreadable body with readable usage.
fn unreadable(wire: Wire) -> ScriptedAnswer {
    let usage = match wire {
        Wire::Anthropic => json!({"input_tokens": 100, "output_tokens": 20}),
        Wire::Openai => json!({"prompt_tokens": 100, "completion_tokens": 20}),
        Wire::Responses => json!({"input_tokens": 100, "output_tokens": 20}),
        Wire::Ollama => Value::Null,
    };
    let body = json!({
        "content": 7, "choices": 7, "output": 7, "message": 7, "usage": usage,
        "done": true, "prompt_eval_count": 100, "eval_count": 20,
    });
    raw(200, "application/json", body.to_string())
}

#[tokio::test]
async fn usage_of_a_rejected_reply_is_added_to_the_next() {
    let (app, agents) = on_every_wire("[retry]\ninitial_delay_ms = 1").await;
    for (wire, agent) in agents {
        app.provider.will(
            &agent,
            [
                unreadable(wire),
                // Neither an answer nor a reason for there being none.
                says("").with_usage(100, 20).with_stop_reason("pause_turn"),
                says("done").with_usage(10, 5),
            ],
        );

        let run = app.run(&agent, "go").await;

        assert_eq!(run.output(), "done", "{agent}");
        assert_eq!(run.usage(), (210, 45, 0), "{agent}");
        assert_eq!(run["tree"]["model_calls"], 3, "{agent}");
        assert_eq!(run["tree"]["cost_usd"], 0.00066, "{agent}");
        assert_eq!(run["tree"]["complete"], true, "{agent}");
        assert_eq!(count(&run.events().await, "retry.scheduled"), 2);
    }
}

#[tokio::test]
async fn a_broken_stream_counts_the_usage_it_reported() {
    let app = TestApp::setup()
        .agent("solo", "stream = true\n[retry]\ninitial_delay_ms = 1")
        .spawn()
        .await;
    app.provider.will(
        "solo",
        [
            says("one two three").with_usage(100, 20).cut(),
            says("done").with_usage(10, 5),
        ],
    );

    let run = app.run("solo", "go").await;

    // Anthropic's wire reports the input at the beginning, and the output at the end.
    assert_eq!(run.output(), "done");
    assert_eq!(run.usage(), (110, 6, 0));
    assert_eq!(run["tree"]["complete"], false);
}

#[tokio::test]
async fn usage_of_rejected_replies_counts_against_the_budget() {
    let app = TestApp::setup()
        .agent(
            "solo",
            "[budget]\nmax_tokens = 5000\n[retry]\nmax_retries = 5\ninitial_delay_ms = 1",
        )
        .spawn()
        .await;
    app.provider.always("solo", |_| {
        says("").with_usage(3000, 1).with_stop_reason("pause_turn")
    });

    let run = app.run("solo", "go").await;

    assert_eq!(run.failure().0, "budget_exceeded");
    assert_eq!(app.provider.requests_for("solo").len(), 2);
    assert_eq!(run.usage(), (6000, 2, 0));
}

/// Some services report the tokens of reasoning beside those of the output.
#[tokio::test]
async fn reasoning_outside_of_the_output_is_counted() {
    let app = TestApp::setup()
        .agent("solo", "model = \"openai/solo\"")
        .spawn()
        .await;
    let body = json!({
        "choices": [{"message": {"content": "done"}, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 32, "completion_tokens": 9, "total_tokens": 170,
            "completion_tokens_details": {"reasoning_tokens": 129},
        },
    });
    app.provider
        .will("solo", [raw(200, "application/json", body.to_string())]);
    assert_eq!(app.run("solo", "go").await.usage(), (32, 138, 0));
}

#[tokio::test]
async fn a_huge_call_id_is_replaced() {
    let app = TestApp::setup()
        .agent(
            "solo",
            "model = \"openai/solo\"\ntools = [\"find_path\"]\nworkdir = \"work\"",
        )
        .file("work/a.md", "a")
        .config("[limits]\nconversation_bytes = \"64 KiB\"")
        .spawn()
        .await;
    let function = json!({"name": "find_path", "arguments": "{\"pattern\": \"*\"}"});
    let call = json!({"id": "x".repeat(1 << 20), "type": "function", "function": function});
    let message = json!({"content": null, "tool_calls": [call]});
    let body = json!({"choices": [{"message": message, "finish_reason": "tool_calls"}]});
    let answer = || raw(200, "application/json", body.to_string());
    app.provider
        .will("solo", [answer(), answer(), says("done")]);

    let run = app.run("solo", "go").await;

    assert_eq!(run.output(), "done");
    let last = app.provider.wait_for_request("solo", 3).await;
    assert!(last.bytes.len() < 16 << 10, "{}", last.bytes.len());
    for event in run.events().await {
        let data = format!("{event:?}");
        assert!(data.len() < 16 << 10, "{} has {}", event.kind(), data.len());
    }
}

#[tokio::test]
async fn invalid_usage_does_not_reject_the_reply() {
    let (app, agents) = on_every_wire("[retry]\nmax_retries = 0").await;
    for (wire, agent) in agents {
        for senseless in [json!(-5), json!("many"), json!(1e30), json!([1])] {
            let usage = match wire {
                Wire::Openai => json!({"prompt_tokens": senseless, "completion_tokens": 5}),
                _ => json!({"input_tokens": senseless, "output_tokens": 5}),
            };
            for usage in [usage, senseless.clone()] {
                let body = match wire {
                    Wire::Anthropic => json!({"content": [{"type": "text", "text": "done"}],
                        "stop_reason": "end_turn", "usage": usage}),
                    Wire::Openai => {
                        json!({"choices": [{"message": {"content": "done"}, "finish_reason": "stop"}],
                        "usage": usage})
                    }
                    Wire::Responses => json!({"status": "completed", "usage": usage, "output":
                        [{"type": "message", "content": [{"type": "output_text", "text": "done"}]}]}),
                    Wire::Ollama => json!({"message": {"content": "done"}, "done": true,
                        "prompt_eval_count": senseless, "eval_count": 5}),
                };
                app.provider
                    .will(&agent, [raw(200, "application/json", body.to_string())]);

                let run = app.run(&agent, "go").await;

                assert_eq!(run.output(), "done", "{agent} {usage}");
                assert_eq!(run.usage(), (0, 0, 0), "{agent} {usage}");
                assert_eq!(run["tree"]["complete"], false, "{agent} {usage}");
            }
        }
    }
}

/// A reply that reached its limit within its last call, after a whole one.
fn cut_within_a_call(wire: Wire, stream: bool) -> ScriptedAnswer {
    let (whole, cut) = ("{\"path\": \"a.md\"}", "{\"path\": \"b");
    let events = |events: &[Value]| {
        let lines = events.iter().map(|event| format!("data: {event}\n\n"));
        raw(200, "text/event-stream", lines.collect::<String>())
    };
    let document = |body: Value| raw(200, "application/json", body.to_string());
    match (wire, stream) {
        (Wire::Anthropic, false) => document(json!({
            "content": [
                {"type": "tool_use", "id": "c1", "name": "read_file", "input": {"path": "a.md"}},
                {"type": "tool_use", "id": "c2", "name": "read_file", "input": {}},
            ],
            "stop_reason": "max_tokens",
        })),
        (Wire::Anthropic, true) => {
            let block = |index, id| {
                json!({"type": "content_block_start", "index": index,
                "content_block": {"type": "tool_use", "id": id, "name": "read_file", "input": {}}})
            };
            let delta = |index, piece| {
                json!({"type": "content_block_delta", "index": index,
                "delta": {"type": "input_json_delta", "partial_json": piece}})
            };
            events(&[
                json!({"type": "message_start", "message": {"content": []}}),
                block(0, "c1"),
                delta(0, whole),
                block(1, "c2"),
                delta(1, cut),
                json!({"type": "message_delta", "delta": {"stop_reason": "max_tokens"}}),
                json!({"type": "message_stop"}),
            ])
        }
        (Wire::Openai, _) => {
            let call = |index, id, arguments| {
                json!({"index": index, "id": id, "type": "function",
                "function": {"name": "read_file", "arguments": arguments}})
            };
            let message = json!({"tool_calls": [call(0, "c1", whole), call(1, "c2", cut)]});
            match stream {
                false => {
                    document(json!({"choices": [{"message": message, "finish_reason": "length"}]}))
                }
                true => events(&[
                    json!({"choices": [{"delta": message}]}),
                    json!({"choices": [{"delta": {}, "finish_reason": "length"}]}),
                    json!("[DONE]"),
                ]),
            }
        }
        (Wire::Responses, _) => {
            let call = |id: &str, arguments| {
                json!({"type": "function_call", "id": format!("f{id}"), "call_id": id,
                "name": "read_file", "arguments": arguments})
            };
            let response = json!({
                "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"},
                "output": [call("c1", whole), call("c2", cut)],
            });
            match stream {
                false => document(response),
                true => events(&[json!({"type": "response.incomplete", "response": response})]),
            }
        }
        (Wire::Ollama, _) => {
            let call =
                |arguments| json!({"function": {"name": "read_file", "arguments": arguments}});
            let calls = [call(json!({"path": "a.md"})), call(json!(cut))];
            document(
                json!({"message": {"content": "", "tool_calls": calls}, "done": true,
                "done_reason": "length"}),
            )
        }
    }
}

#[tokio::test]
async fn a_call_cut_by_the_token_limit_is_not_performed() {
    let mut setup = TestApp::setup().file("work/a.md", "alpha");
    let mut agents = Vec::new();
    for wire in Wire::ALL {
        for stream in [false, true] {
            let agent = format!("{}-{stream}", wire.name());
            let settings = format!(
                "model = \"{}/{agent}\"\nstream = {stream}\ntools = [\"read_file\"]\n\
                 workdir = \"work\"\n[params]\nmax_tokens = 77",
                wire.name()
            );
            setup = setup.agent(&agent, &settings);
            agents.push((wire, stream, agent));
        }
    }
    let app = setup.spawn().await;
    for (wire, stream, agent) in agents {
        app.provider
            .will(&agent, [cut_within_a_call(wire, stream), says("done")]);

        let run = app.run(&agent, "go").await;

        assert_eq!(run.output(), "done", "{agent}");
        let results = app
            .provider
            .wait_for_request(&agent, 2)
            .await
            .tool_results();
        assert_eq!(results.len(), 2, "{agent}");
        assert!(results[0].contains("alpha"), "{agent}: {}", results[0]);
        let why = "not performed: the reply reached its limit of 77 tokens (params.max_tokens)";
        assert!(results[1].contains(why), "{agent}: {}", results[1]);
        let warnings = run["warnings"].as_array().expect("warnings");
        assert_eq!(warnings.len(), 1, "{agent}: {warnings:?}");
        assert_eq!(warnings[0]["code"], "call_cut", "{agent}");
        assert_eq!(warnings[0]["turn"], 1, "{agent}");
        let message = warnings[0]["message"].as_str().expect("a message");
        assert!(message.contains("read_file was not performed"), "{message}");
        assert_eq!(run["tool_calls"], 1, "{agent}");
    }
}

#[tokio::test]
async fn a_call_whose_arguments_are_not_json_is_not_performed() {
    let mut setup = TestApp::setup().file("work/a.md", "alpha");
    for wire in Wire::ALL {
        let settings = format!(
            "model = \"{0}/{0}\"\ntools = [\"list_directory\"]\nworkdir = \"work\"",
            wire.name()
        );
        setup = setup.agent(wire.name(), &settings);
    }
    let app = setup.spawn().await;
    for wire in Wire::ALL {
        for sent in ["{\"path\": \"su", "{'path': '.'}", "the subfolder"] {
            app.provider.will(
                wire.name(),
                [calls([("list_directory", json!(sent))]), says("done")],
            );

            let run = app.run(wire.name(), "go").await;

            assert_eq!(run.output(), "done", "{wire:?}");
            let request = app.provider.requests().pop().expect("a request");
            let result = request.tool_results().remove(0);
            assert!(
                result.contains("not performed: its arguments are not valid JSON"),
                "{wire:?}: {result}"
            );
            assert_eq!(run["tool_calls"], 0, "{wire:?}");
        }
    }
}

#[tokio::test]
async fn a_reply_that_the_service_gave_up_fails_the_run() {
    let (app, agents) = on_every_wire("[retry]\nmax_retries = 0").await;
    for (wire, agent) in agents {
        if wire == Wire::Responses {
            // Its reasons are its states.
            continue;
        }
        for reason in ["error", "abort", "insufficient_system_resource", "strange"] {
            app.provider.will(
                &agent,
                [says("Once upon")
                    .with_usage(100, 20)
                    .with_stop_reason(reason)],
            );

            let run = app.run(&agent, "go").await;

            let message = run.failure().1;
            assert!(message.contains(reason), "{agent}: {message}");
            assert_eq!(run["error"]["retryable"], true, "{agent}");
            assert_eq!(run.usage(), (100, 20, 0), "{agent}");
        }
    }
}
