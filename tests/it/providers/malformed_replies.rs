//! What no service should send, and what clients make of it.

use std::time::Duration;

use axed::providers::{ErrorCategory, ReplyOutcome};
use serde_json::{Value, json};

use crate::support::client::{
    ComparableReply, KEY, WIRES, complete_hello, expect_error, provider_config, provider_handle,
    recorded_stream, replay_client,
};
use crate::support::provider::recorded_request::Wire;
use crate::support::refusing_address;
use crate::support::replay::{CannedResponse, ReplayServer};

#[tokio::test]
async fn a_truncated_body_is_a_broken_connection() {
    for kind in WIRES {
        let error = expect_error(
            kind,
            CannedResponse::json(200, "{\"choices\": []}").cut_after(9),
            false,
        )
        .await;
        assert_eq!(error.category, ErrorCategory::Server, "{kind:?}: {error}");
        assert!(
            error.message.starts_with("the reply broke off"),
            "{kind:?}: {error}"
        );
        assert!(error.may_be_billed);
    }
}

#[tokio::test]
async fn an_invalid_reply_is_reported_as_unreadable() {
    let html = "<!DOCTYPE html><html><body>Bad gateway</body></html>";
    for kind in WIRES {
        for stream in [false, true] {
            let error =
                expect_error(kind, CannedResponse::new(200, "text/html", html), stream).await;
            let why = "server: failed to parse response: expected value at line 1 column 1";
            assert_eq!(error.to_string(), why, "{kind:?}, streamed: {stream}");
            assert!(error.may_be_billed);
        }
        let error = expect_error(kind, CannedResponse::json(200, ""), false).await;
        assert!(
            error
                .to_string()
                .starts_with("server: failed to parse response: EOF"),
            "{error}"
        );
        let deep = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
        let error = expect_error(kind, CannedResponse::json(200, &deep), false).await;
        assert!(
            error
                .to_string()
                .starts_with("server: failed to parse response: "),
            "{error}"
        );
        let error = expect_error(
            kind,
            CannedResponse::new(200, "application/json", b"{\"model\":\"\xff\xfe\"}"),
            false,
        )
        .await;
        assert!(
            error
                .to_string()
                .starts_with("server: response contains no "),
            "{error}"
        );
    }
}

#[tokio::test]
async fn an_empty_reply_is_an_empty_text_only_after_a_normal_end() {
    let anthropic = |stop: &str| format!("{{\"content\":[],\"stop_reason\":{stop}}}");
    let openai = |stop: &str| {
        format!("{{\"choices\":[{{\"message\":{{\"content\":null}},\"finish_reason\":{stop}}}]}}")
    };
    let responses = |status: &str| format!("{{\"output\":[],\"status\":{status}}}");
    let ollama = |stop: &str| {
        format!("{{\"message\":{{\"content\":\"\"}},\"done\":true,\"done_reason\":{stop}}}")
    };
    for (kind, body, cut) in [
        (
            Wire::Anthropic,
            anthropic("\"end_turn\""),
            anthropic("\"max_tokens\""),
        ),
        (Wire::Openai, openai("\"stop\""), openai("\"length\"")),
        (
            Wire::Responses,
            responses("\"completed\""),
            responses("\"incomplete\",\"incomplete_details\":{\"reason\":\"max_output_tokens\"}"),
        ),
        (Wire::Ollama, ollama("\"stop\""), ollama("\"length\"")),
    ] {
        let (_service, served) = replay_client(kind, CannedResponse::json(200, &body));
        let (reply, _) = complete_hello(&served, false).await;
        let reply = reply.expect("a reply");
        assert_eq!(
            (reply.message.content.as_str(), reply.usage),
            ("", None),
            "{kind:?}"
        );
        assert_eq!(reply.outcome, ReplyOutcome::Complete);
        let (_service, served) = replay_client(kind, CannedResponse::json(200, &cut));
        let (reply, _) = complete_hello(&served, false).await;
        assert_eq!(
            reply.expect("a reply").outcome,
            ReplyOutcome::Truncated,
            "{kind:?}"
        );
    }
    let error = expect_error(
        Wire::Openai,
        CannedResponse::json(200, "{\"choices\":[]}"),
        false,
    )
    .await;
    assert_eq!(error.to_string(), "server: response contains no choices");
}

#[tokio::test]
async fn the_size_of_a_reply_is_bounded() {
    for kind in WIRES {
        let endless = [
            // A line that never ends, events that never end, and a body that never ends.
            (
                CannedResponse::new(200, "text/event-stream", "on and on ".repeat(100)),
                true,
            ),
            (
                CannedResponse::new(200, "text/event-stream", ": still here\n\n".repeat(100)),
                true,
            ),
            (CannedResponse::json(200, &" ".repeat(1000)), false),
            (CannedResponse::json(500, &" ".repeat(1000)), false),
        ];
        for (answer, stream) in endless {
            let service = ReplayServer::start([answer.endless()]);
            let mut config = provider_config(kind, &service.base_url());
            config.max_reply = 100_000;
            let (reply, _) = complete_hello(&provider_handle(config), stream).await;
            let error = reply.expect_err("no reply");
            // Comments are no messages on Ollama's wire.
            let unreadable = error.message.starts_with("failed to parse response");
            assert!(
                error.to_string() == "server: response too large"
                    || (kind == Wire::Ollama && stream && unreadable),
                "{kind:?}: {error}"
            );
        }
    }
}

#[tokio::test]
async fn excessive_tool_calls_are_bounded() {
    let huge = "n".repeat(10_000);
    let call = json!({"index": 4_000_000_000_u64, "id": "c", "function": {"name": huge, "arguments": "{\"a\": [1"}});
    let event = |calls: Vec<Value>| {
        let chunk =
            json!({"choices": [{"delta": {"tool_calls": calls}, "finish_reason": "tool_calls"}]});
        format!("data: {chunk}\n\ndata: [DONE]\n\n")
    };
    let answer = CannedResponse::new(200, "text/event-stream", event(vec![call.clone()]));
    let (_service, served) = replay_client(Wire::Openai, answer);
    let reply = ComparableReply::from(complete_hello(&served, true).await.0.expect("a reply"));
    assert_eq!(
        reply.calls,
        [("c".to_owned(), huge, json!({}))],
        "a cut call gets no arguments"
    );

    let many = (0..2000)
        .map(|n| json!({"index": n, "id": format!("c{n}"), "function": {"name": "t"}}))
        .collect();
    let answer = CannedResponse::new(200, "text/event-stream", event(many));
    let error = expect_error(Wire::Openai, answer, true).await;
    assert_eq!(
        error.to_string(),
        "server: response has more than 1000 tool calls"
    );
}

#[tokio::test]
async fn equal_call_ids_of_a_service_are_made_unique() {
    let piece = |call: Value| {
        format!(
            "data: {}\n\n",
            json!({"choices": [{"delta": {"tool_calls": [call]}}]})
        )
    };
    let body = [
        piece(
            json!({"index": 0, "id": "a", "function": {"name": "one", "arguments": "{\"n\":1}"}}),
        ),
        piece(json!({"index": 0, "id": "b", "function": {"name": "two", "arguments": {"n": 2}}})),
        piece(json!({"id": "c", "function": {"name": "three", "arguments": "{\"n\":"}})),
        piece(json!({"id": "c", "function": {"name": "three", "arguments": "3}"}})),
        piece(json!({"index": 7, "function": {"name": "four", "arguments": null}})),
        "data: [DONE]\n\n".to_owned(),
    ];
    let answer = CannedResponse::new(200, "text/event-stream", body.concat());
    let (_service, served) = replay_client(Wire::Openai, answer);
    let reply = ComparableReply::from(complete_hello(&served, true).await.0.expect("a reply"));
    let call = |id: &str, name: &str, arguments| (id.to_owned(), name.to_owned(), arguments);
    assert_eq!(
        reply.calls,
        [
            call("a", "one", json!({"n": 1})),
            call("b", "two", json!({"n": 2})),
            call("c", "three", json!({"n": 3})),
            call("call_3", "four", json!({})),
        ]
    );
}

#[tokio::test]
async fn arguments_may_arrive_before_the_calls_name() {
    let piece = |call: Value| {
        format!(
            "data: {}\n\n",
            json!({"choices": [{"delta": {"tool_calls": [call]}}]})
        )
    };
    for index in [json!(0), Value::Null] {
        let body = [
            piece(json!({"index": index, "function": {"arguments": "{\"n\":"}})),
            piece(json!({"index": index, "id": "a", "function": {"name": "one"}})),
            piece(json!({"index": index, "function": {"arguments": "1}"}})),
            "data: [DONE]\n\n".to_owned(),
        ];
        let answer = CannedResponse::new(200, "text/event-stream", body.concat());
        let (_service, served) = replay_client(Wire::Openai, answer);
        let reply = ComparableReply::from(complete_hello(&served, true).await.0.expect("a reply"));
        let call = ("a".to_owned(), "one".to_owned(), json!({"n": 1}));
        assert_eq!(reply.calls, [call]);
    }
}

#[tokio::test]
async fn responses_with_missing_events_are_read() {
    let call = json!({"type": "function_call", "id": "fc", "call_id": "c", "name": "add", "arguments": "{\"n\":1}"});
    let said = json!({"type": "message", "id": "msg", "role": "assistant",
        "content": [{"type": "output_text", "text": "Hel"}, {"type": "output_text", "text": "lo"}]});
    let last = |output: Value| {
        json!({"type": "response.incomplete", "response": {"status": "incomplete", "output": output,
            "incomplete_details": {"reason": "max_output_tokens"}}})
    };
    let piece = |delta: &str| json!({"type": "response.function_call_arguments.delta", "item_id": "fc", "delta": delta});
    let streams = [
        // Everything in the last event.
        vec![last(json!([said, call]))],
        // Items without pieces.
        vec![
            json!({"type": "response.output_item.done", "output_index": 0, "item": said}),
            json!({"type": "response.output_item.done", "output_index": 1, "item": call}),
            last(json!([])),
        ],
        // Pieces without an end.
        vec![
            json!({"type": "response.output_item.added", "item": {"type": "message", "id": "msg", "content": []}}),
            json!({"type": "response.output_text.delta", "item_id": "msg", "delta": "Hel"}),
            json!({"type": "response.output_text.delta", "item_id": "msg", "delta": "lo"}),
            json!({"type": "response.output_item.added", "item":
                {"type": "function_call", "id": "fc", "call_id": "c", "name": "add", "arguments": ""}}),
            piece("{\"n\""),
            piece(":1}"),
            last(json!(null)),
        ],
        // Half of the pieces, and the rest at the end.
        vec![
            json!({"type": "response.output_text.delta", "output_index": 0, "delta": "Hel"}),
            piece("{\"n\""),
            last(json!([said, call])),
        ],
    ];
    for (n, events) in streams.into_iter().enumerate() {
        let lines = events.iter().map(|event| format!("data: {event}\n\n"));
        let answer = CannedResponse::new(200, "text/event-stream", lines.collect::<String>());
        let (_service, served) = replay_client(Wire::Responses, answer);
        let (reply, deltas) = complete_hello(&served, true).await;
        let reply = ComparableReply::from(reply.expect("a reply"));
        assert_eq!(
            (deltas.as_str(), reply.text.as_str()),
            ("Hello", "Hello"),
            "{n}"
        );
        let add = ("c".to_owned(), "add".to_owned(), json!({"n": 1}));
        assert_eq!(reply.calls, [add], "{n}");
        assert_eq!(reply.stop.as_deref(), Some("max_output_tokens"));
    }
}

#[tokio::test]
async fn an_error_in_a_stream_ends_it() {
    let error = |kind, body: &str| {
        expect_error(
            kind,
            CannedResponse::new(200, "text/event-stream", body),
            true,
        )
    };
    let anthropic = error(
        Wire::Anthropic,
        "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"content\":[]}}\n\n\
         event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"Overloaded\"}}\n\n",
    );
    assert_eq!(anthropic.await.to_string(), "overloaded: Overloaded");
    let openai = error(
        Wire::Openai,
        "data: {\"choices\":[{\"delta\":{\"content\":\"he\"}}]}\n\ndata: {\"error\":{\"code\":429,\"message\":\"slow down\"}}\n\n",
    );
    let openai = openai.await;
    assert_eq!(openai.to_string(), "rate_limit: slow down");
    assert!(openai.may_be_billed);
    let begun =
        "data: {\"type\":\"response.output_text.delta\",\"output_index\":0,\"delta\":\"he\"}\n\n";
    for (event, reported) in [
        (
            json!({"type": "error", "code": "rate_limit_exceeded", "message": "slow down", "param": null}),
            "rate_limit: slow down",
        ),
        (
            json!({"type": "response.failed", "response": {"status": "failed",
                "error": {"code": "server_error", "message": "The model broke down."}}}),
            "server: The model broke down.",
        ),
        (
            json!({"type": "response.failed", "response": {"status": "failed",
                "error": {"code": "invalid_prompt", "message": "Not this."}}}),
            "bad_request: Not this.",
        ),
        (
            json!({"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}),
            "server: Loading model",
        ),
    ] {
        let body = format!("{begun}data: {event}\n\n");
        let error = error(Wire::Responses, &body).await;
        assert_eq!(error.to_string(), reported);
        assert!(error.may_be_billed);
    }
    let whole =
        json!({"status": "failed", "error": {"code": "server_error", "message": "It broke."}});
    let whole = CannedResponse::json(200, &whole.to_string());
    let whole = expect_error(Wire::Responses, whole, false).await;
    assert_eq!(whole.to_string(), "server: It broke.");
    let ollama = error(
        Wire::Ollama,
        "{\"message\":{\"content\":\"he\"},\"done\":false}\n{\"error\":\"the runner crashed\"}",
    );
    assert_eq!(ollama.await.to_string(), "server: the runner crashed");
}

#[tokio::test]
async fn an_error_status_has_a_category_and_retry_after() {
    for kind in WIRES {
        let busy = CannedResponse::json(429, "{\"error\":{\"message\":\"slow down\"}}")
            .header("Retry-After", "7");
        let error = expect_error(kind, busy, false).await;
        assert_eq!(error.to_string(), "rate_limit: slow down");
        assert_eq!(error.retry_after, Some(Duration::from_secs(7)));
        assert!(!error.may_be_billed);

        let at = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(1000);
        let left = || at.as_second() - jiff::Timestamp::now().as_second();
        let date = jiff::fmt::rfc2822::DateTimePrinter::new()
            .timestamp_to_rfc9110_string(&at)
            .expect("a date");
        let busy = CannedResponse::json(529, "").header("retry-after", &date);
        let most = left();
        let error = expect_error(kind, busy, true).await;
        assert_eq!(error.to_string(), "overloaded: HTTP 529");
        let wait = error.retry_after.expect("a wish");
        let wait = i64::try_from(wait.as_secs()).expect("seconds");
        assert!((left()..=most).contains(&wait), "{wait}");

        let body = "{\"error\":{\"type\":\"x\",\"message\":\"the engine is overloaded\"}}";
        let error = expect_error(kind, CannedResponse::json(503, body), false).await;
        assert_eq!(error.to_string(), "overloaded: the engine is overloaded");
        let error = expect_error(
            kind,
            CannedResponse::new(503, "text/html", "<p>down"),
            false,
        )
        .await;
        assert_eq!(error.to_string(), "server: Service Unavailable");
    }
}

#[tokio::test]
async fn redirects_are_not_followed() {
    for kind in WIRES {
        let moved = CannedResponse::new(307, "text/plain", "").header("location", "/elsewhere");
        let (service, served) = replay_client(kind, moved);
        let (reply, _) = complete_hello(&served, false).await;
        let error = reply.expect_err("no reply");
        let expected = "server: Temporary Redirect: redirects are not followed; check base_url";
        assert_eq!(error.to_string(), expected, "{kind:?}");
        assert_eq!(service.requests().len(), 1);
    }
}

#[tokio::test]
async fn an_unreachable_provider_is_a_server_error_with_a_hint_for_ollama() {
    let (_socket, address) = refusing_address();
    let base = format!("http://{address}");
    for kind in WIRES {
        let (reply, _) =
            complete_hello(&provider_handle(provider_config(kind, &base)), false).await;
        let error = reply.expect_err("no reply").to_string();
        match kind {
            Wire::Ollama => {
                let hint =
                    format!("server: connection refused: is Ollama running? (expected at {base})");
                assert_eq!(error, hint);
            }
            _ => {
                let place = base.strip_prefix("http://").expect("an address");
                let reported = format!("server: could not connect to {place}: Connection refused");
                assert!(error.starts_with(&reported), "{error}");
            }
        }
    }
}

#[tokio::test]
async fn a_request_that_takes_too_long_times_out() {
    for kind in WIRES {
        for answer in [
            CannedResponse::silent(),
            CannedResponse::json(200, "").stalled(),
            recorded_stream(kind).stalled(),
        ] {
            let service = ReplayServer::start([answer.clone()]);
            let mut config = provider_config(kind, &service.base_url());
            config.timeout = Some(Duration::from_millis(50));
            let (reply, _) = complete_hello(&provider_handle(config), answer.is_stream()).await;
            let error = reply.expect_err("no reply").to_string();
            assert_eq!(error, "timeout: no complete reply within 0.05s", "{kind:?}");
        }
    }
}

#[tokio::test]
async fn a_key_repeated_by_the_service_is_redacted() {
    for kind in WIRES {
        let body = format!("{{\"error\":{{\"message\":\"Incorrect API key provided: {KEY}.\"}}}}");
        for (status, category) in [(401, "auth"), (200, "server")] {
            let error = expect_error(kind, CannedResponse::json(status, &body), false).await;
            assert_eq!(
                error.to_string(),
                format!("{category}: Incorrect API key provided: [redacted].")
            );
        }
        let wrong = format!(
            "{{\"choices\":\"{KEY}\",\"content\":\"{KEY}\",\"message\":\"{KEY}\",\"output\":\"{KEY}\"}}"
        );
        let error = expect_error(kind, CannedResponse::json(200, &wrong), false).await;
        assert!(error.message.contains("[redacted]"), "{error}");
        // Long ones are truncated, also within the key.
        let long = "x".repeat(995);
        let body = format!("{{\"error\":{{\"message\":\"{long}{KEY}\"}}}}");
        let error = expect_error(kind, CannedResponse::json(401, &body), false).await;
        assert_eq!(error.message, format!("{long}[redacted]"));
        let wrong = format!(
            "{{\"choices\":\"{long}{KEY}\",\"content\":\"{long}{KEY}\",\"message\":\"{long}{KEY}\",\"output\":\"{long}{KEY}\"}}"
        );
        let error = expect_error(kind, CannedResponse::json(200, &wrong), false).await;
        let max = 1000 + "[redacted]".len();
        assert!(error.message.chars().count() <= max, "{error}");
        assert!(!error.message.contains("sk-"), "{error}");
    }
}

#[tokio::test]
async fn a_dropped_request_closes_its_connection() {
    for kind in WIRES {
        for answer in [CannedResponse::silent(), recorded_stream(kind).stalled()] {
            let (service, served) = replay_client(kind, answer);
            tokio::select! {
                (reply, _) = complete_hello(&served, true) => panic!("{reply:?}"),
                () = service.wait_for_request() => {}
            }
            service.wait_for_disconnect().await;
        }
    }
}

#[tokio::test]
async fn a_stream_ends_at_its_last_message() {
    for kind in WIRES {
        let (service, served) = replay_client(kind, recorded_stream(kind).endless());
        complete_hello(&served, true).await.0.expect("a reply");
        service.wait_for_disconnect().await;
    }
}
