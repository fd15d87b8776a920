//! What real servers sent, replayed byte for byte to the real clients.

use axed::domain::message::{Message, ToolResult};
use axed::domain::usage::TokenUsage;
use axed::providers::ErrorCategory;
use serde_json::{Value, json};

use crate::support::client::{
    ComparableReply, WIRES, complete_hello, complete_messages, expect_error, provider_config,
    provider_handle, recorded_stream, replay_client, wire_name,
};
use crate::support::provider::recorded_request::Wire;
use crate::support::replay::{CannedResponse, ReplayServer};

/// Reads a table of recorded replies (case | id of the call | stop reason | tokens in, out, cached | text; `-` is none)
/// and replays each whole and in chunks of several sizes.
async fn replays(kind: Wire, model: &str, arguments: Value, table: &str) {
    for row in table.lines().filter(|line| line.contains('|')) {
        let [case, call, stop, tokens, text] = row
            .split('|')
            .map(str::trim)
            .collect::<Vec<_>>()
            .try_into()
            .expect("five columns");
        let answer = CannedResponse::recorded(wire_name(kind), case);
        let stream = answer.is_stream();
        let expected = ComparableReply {
            text: text.to_owned(),
            calls: (call != "-")
                .then(|| (call.to_owned(), "call_agent".to_owned(), arguments.clone()))
                .into_iter()
                .collect(),
            stop: Some(stop.to_owned()),
            usage: used(tokens),
            model: Some(model.to_owned()),
            echo: None,
        };
        let mut manners = vec![answer.clone()];
        manners.extend([1, 2, 7, 100, 4096].map(|size| answer.clone().in_chunks(size)));
        for answer in manners {
            let (_service, served) = replay_client(kind, answer);
            let (reply, deltas) = complete_hello(&served, stream).await;
            let reply = ComparableReply::from(reply.unwrap_or_else(|why| panic!("{case}: {why}")));
            assert_eq!(reply, expected, "{case}");
            assert_eq!(deltas, if stream { text } else { "" }, "{case}");
        }
    }
}

fn used(tokens: &str) -> Option<TokenUsage> {
    let mut tokens = tokens.split(' ').map(str::parse::<u64>);
    let mut next = || tokens.next()?.ok();
    Some(TokenUsage {
        input: next()?,
        output: next()?,
        cache_read: next()?,
        ..TokenUsage::default()
    })
}

#[tokio::test]
async fn replies_recorded_on_openais_wire_are_read() {
    let arguments = json!({
        "agent": "researcher",
        "task": "find out when the Rust language 1.0 was released",
        "context": "The Rust language 1.0 was released on October 20, 2018.",
    });
    let table = "
02_tool_call                 | CO8gEvmJN0lxUC8rftsUy7nIr3ynTz6t | tool_calls | 273 65 0   |
03_tool_call_required        | QMfuHUwsdO4HYbMFqOIhsQbTNQh8JAra | tool_calls | 273 65 272 |
04_tool_call_named           | 9aFliu5oNnBHw1p48zwCpyHCRi0V48Hj | tool_calls | 273 65 272 |
06_tool_call_stream          | 9uBjdTuxj8i5uwH85nH42GdcLDaqfbth | tool_calls | 273 65 272 |
07_tool_result               | - | stop   | 395 20 337 | Rust 1.0 was released on 15 May 2015.
08_tool_result_null_content  | - | stop   | 395 20 394 | Rust 1.0 was released on 15 May 2015.
09_tool_result_stream        | - | stop   | 395 20 394 | Rust 1.0 was released on 15 May 2015.
10_plain                     | - | stop   | 35 2 5     | Hello
11_plain_stream              | - | stop   | -          | Hello
12_max_completion_tokens_cut | - | length | 35 3 24    | Sure, here
13_developer_role            | - | stop   | 24 2 3     | Hello
19_err_key                   | - | stop   | 35 2 24    | Hello
";
    replays(Wire::Openai, "qwen2.5-coder", arguments, table).await;

    let answer = CannedResponse::recorded("openai", "05_tool_choice_none");
    let (_service, served) = replay_client(Wire::Openai, answer);
    let reply = complete_hello(&served, false).await.0.expect("a reply");
    assert!(
        reply
            .message
            .content
            .starts_with("```json\n{\"name\": \"call_agent\"")
    );
    assert_eq!(reply.stop_reason.as_deref(), Some("length"));
}

#[tokio::test]
async fn replies_recorded_on_the_responses_wire_are_read() {
    let arguments = json!({"agent": "reader", "task": "read README"});
    // The server reports a cut reply like a whole one.
    let table = "
01_plain            | - | completed | 32 5 5     | Hello, world!
03_tool_call        | call_cjoTw1HZ6OaKmjmhFWjTvxZuZDotHvkE | completed | 188 28 15  |
04_tool_call_stream | call_XHHJcgZ107y6U6pGfOVtgJSeGalxnISr | completed | 188 28 187 |
05_tool_result      | - | completed | 264 10 212 | The README says: axed serves agents.
06_tool_result_after_text_stream | - | completed | 270 10 188 | The README says: axed serves agents.
07_cut              | - | completed | 34 8 15    | Once upon a time, there was a
08_cut_stream       | - | completed | 34 8 33    | Once upon a time, there was a
";
    replays(Wire::Responses, "qwen2.5-coder", arguments, table).await;
}

#[tokio::test]
async fn replies_recorded_on_anthropics_wire_are_read() {
    let arguments = json!({
        "agent": "researcher",
        "task": "find out when the Rust language 1.0 was released",
        "context": "The Rust language 1.0 was released on October 20, 2018.",
    });
    // The cached tokens, which the wire leaves out of its input, are in ours.
    let table = "
03_tool_use           | mlOK6uJf2Q25NpszpsGOV5zrDL3JBs2B | tool_use | 273 65 272 |
04_tool_use_any       | kPAHfWgEBMJ2ZYZFnsQwKluZTgcBlnhT | tool_use | 273 65 272 |
05_tool_use_named     | 5ZIDDoDuep1xO8FpuDtxWkrSR8MR9XaK | tool_use | 273 65 272 |
06_tool_use_stream    | lKcQFGGFj1F5OJ4Oj8YyTbu0WeSfvc9l | tool_use | 273 65 272 |
07_tool_result        | - | end_turn   | 395 20 337 | Rust 1.0 was released on 15 May 2015.
08_tool_result_error  | - | end_turn   | 381 22 346 | The Rust language 1.0 was released on October 20, 2018.
09_tool_result_stream | - | end_turn   | 395 20 346 | Rust 1.0 was released on 15 May 2015.
10_plain              | - | end_turn   | 35 2 34    | Hello
11_system_blocks      | - | end_turn   | 21 2 15    | Hello
12_plain_stream       | - | end_turn   | 35 2 34    | Hello
13_max_tokens_cut     | - | max_tokens | 35 3 24    | Sure, here
14_stop_sequence      | - | end_turn   | 40 5 26    | 1234
16_err_no_max_tokens  | - | end_turn   | 35 2 24    | Hello
19_err_key            | - | end_turn   | 35 2 34    | Hello
";
    replays(Wire::Anthropic, "qwen2.5-coder", arguments, table).await;
}

#[tokio::test]
async fn replies_recorded_from_ollama_are_read() {
    let arguments = json!({
        "agent": "researcher",
        "task": "find out when the Rust language 1.0 was released",
    });
    let table = "
03_tool_call           | ollama_0 | stop | 285 39 0 |
04_tool_call_stream    | ollama_0 | stop | 285 39 0 |
05_tool_result         | - | stop   | 378 21 0 | Rust 1.0 was released on May 15, 2015.
06_tool_result_stream  | - | stop   | 378 21 0 | Rust 1.0 was released on May 15, 2015.
07_tool_result_with_id | - | stop   | 378 21 0 | Rust 1.0 was released on May 15, 2015.
09_plain               | - | stop   | 14 2 0   | Hello
10_plain_stream        | - | stop   | 14 2 0   | Hello
11_num_predict_cut     | - | length | 14 3 0   | Here is a
";
    replays(Wire::Ollama, "qwen2.5-coder:1.5b", arguments, table).await;
}

#[tokio::test]
async fn recorded_errors_keep_the_services_message() {
    let words = "
openai    14_err_bad_json           server: [json.exception.parse_error.101] parse error at line 1, column 29: syntax error while parsing value - unexpected end of input; expected '[', '{', or a literal
openai    15_err_no_messages        bad_request: 'messages' is required
openai    16_err_messages_wrong_type bad_request: Expected 'messages' to be an array
openai    17_err_too_long           bad_request: request (20030 tokens) exceeds the available context size (8192 tokens), try increasing it
openai    18_err_not_found          bad_request: File Not Found
anthropic 15_err_bad_json           server: [json.exception.parse_error.101] parse error at line 1, column 29: syntax error while parsing value - unexpected end of input; expected '[', '{', or a literal
anthropic 17_err_no_messages        server: 'messages' is required
anthropic 18_err_too_long           bad_request: request (20030 tokens) exceeds the available context size (8192 tokens), try increasing it
responses 12_err_bad_json           server: [json.exception.parse_error.101] parse error at line 1, column 2: syntax error while parsing object key - unexpected end of input; expected string literal
responses 13_err_no_input           bad_request: 'input' is required
responses 14_err_input_wrong_type   bad_request: 'input' must be a string or array of objects
responses 15_err_too_long           bad_request: request (20027 tokens) exceeds the available context size (8192 tokens), try increasing it
ollama    08_err_arguments_as_string bad_request: Value looks like object, but can't find closing '}' symbol
ollama    12_err_no_model           bad_request: model is required
ollama    13_err_unknown_model      bad_request: model 'no-such-model' not found
ollama    14_err_unknown_model_stream bad_request: model 'no-such-model' not found
ollama    15_err_bad_json           bad_request: unexpected EOF
ollama    16_err_think_unsupported  bad_request: \"qwen2.5-coder:1.5b\" does not support thinking
ollama    17_err_messages_wrong_type bad_request: json: cannot unmarshal string into Go struct field ChatRequest.messages of type []api.Message
ollama    18_err_not_found          bad_request: 404 page not found
";
    // Another question's answer is no reply, and no reason to panic.
    let strangers = "
openai    01_models       server: response contains no choices
anthropic 01_models       server: response contains no content
anthropic 02_count_tokens server: response contains no content
ollama    01_version      server: response contains no content
ollama    02_tags         server: response contains no content
ollama    19_ps           server: response contains no content
";
    for (table, is_refusal) in [(words, true), (strangers, false)] {
        for row in table.lines().filter(|row| !row.is_empty()) {
            let (folder, row) = row.split_once(' ').expect("a folder");
            let (case, message) = row.trim().split_once(' ').expect("a case");
            let kind = WIRES.into_iter().find(|kind| wire_name(*kind) == folder);
            let kind = kind.expect("a wire");
            let answer = CannedResponse::recorded(folder, case);
            let mut manners = vec![
                (answer.clone(), false),
                (answer.clone().in_chunks(3), false),
            ];
            if is_refusal {
                manners.push((answer, true));
            }
            for (answer, stream) in manners {
                let error = expect_error(kind, answer, stream).await;
                assert_eq!(error.to_string(), message.trim(), "{kind:?} {case}");
                assert_eq!(error.may_be_billed, !is_refusal, "{kind:?} {case}");
            }
        }
    }
}

#[tokio::test]
async fn a_stream_cut_at_any_point_is_a_broken_connection() {
    for kind in WIRES {
        let length = recorded_stream(kind).len();
        for at in (1..length - 20).step_by(199) {
            let error = expect_error(kind, recorded_stream(kind).cut_after(at), true).await;
            assert_eq!(
                error.category,
                ErrorCategory::Server,
                "{kind:?} at {at}: {error}"
            );
            assert!(
                error.message.starts_with("the reply broke off"),
                "{kind:?} at {at}: {error}"
            );
            assert!(error.may_be_billed);
        }
        // A body that ends as HTTP wants, but before its last message.
        let body = b"{\"error\":{\"message\":\"half\"".to_vec();
        for body in [Vec::new(), body] {
            let answer = CannedResponse::new(200, "text/event-stream", body).in_chunks(5);
            let error = expect_error(kind, answer, true).await;
            assert_eq!(
                error.to_string(),
                "server: the stream ended before the reply was complete",
                "{kind:?}"
            );
            assert!(error.may_be_billed);
        }
    }
}

#[tokio::test]
async fn a_stream_may_end_after_the_reason_for_its_end() {
    let openai = [
        json!({"choices": [{"delta": {"content": "hi"}, "finish_reason": null}]}),
        json!({"choices": [{"delta": {}, "finish_reason": "stop"}]}),
        json!({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}),
    ];
    let anthropic = [
        json!({"type": "message_start",
            "message": {"content": [], "usage": {"input_tokens": 3, "output_tokens": 0}}}),
        json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
        json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}}),
        json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}}),
    ];
    // Some servers repeat the reason, or send the usage with an empty choice.
    let usage = json!({"prompt_tokens": 3, "completion_tokens": 1});
    let empty_end = [
        openai[0].clone(),
        openai[1].clone(),
        openai[1].clone(),
        json!({"choices": [{"delta": {"content": ""}, "finish_reason": null}], "usage": usage}),
    ];
    let answer = |events: &[Value]| {
        let lines = events.iter().map(|event| format!("data: {event}\n\n"));
        let body = lines.collect::<String>();
        CannedResponse::new(200, "text/event-stream", body).in_chunks(5)
    };
    for (kind, events, usage) in [
        (Wire::Openai, &openai[..], Some((3, 1))),
        (Wire::Openai, &openai[..2], None),
        (Wire::Openai, &empty_end[..], Some((3, 1))),
        (Wire::Anthropic, &anthropic[..], Some((3, 1))),
    ] {
        let (_service, served) = replay_client(kind, answer(events));
        let (reply, deltas) = complete_hello(&served, true).await;
        let reply = reply.expect("a reply");
        let text = reply.message.content.as_str();
        assert_eq!((text, deltas.as_str()), ("hi", "hi"), "{kind:?}");
        let used = reply.usage.map(|usage| (usage.input, usage.output));
        assert_eq!(used, usage, "{kind:?}");
    }
    // Some servers send a reason in every chunk.
    let early_reason = [
        json!({"choices": [{"delta": {"content": "hi, "}, "finish_reason": "stop"}]}),
        json!({"choices": [{"delta": {"content": "but"}, "finish_reason": "stop"}]}),
    ];
    let empty_reason = [json!({"choices": [{"delta": {"content": "hi"}, "finish_reason": ""}]})];
    for (kind, events) in [
        (Wire::Openai, &openai[..1]),
        (Wire::Openai, &empty_reason[..]),
        (Wire::Openai, &early_reason[..]),
        (Wire::Openai, &early_reason[..1]),
        (Wire::Anthropic, &anthropic[..3]),
    ] {
        let error = expect_error(kind, answer(events), true).await;
        let expected = "server: the stream ended before the reply was complete";
        assert_eq!(error.to_string(), expected, "{kind:?}");
    }
    let cut = answer(&openai).cut_after(answer(&openai[..2]).len());
    let error = expect_error(Wire::Openai, cut, true).await;
    assert!(error.message.starts_with("the reply broke off"), "{error}");
}

#[tokio::test]
async fn a_reply_in_another_content_type_than_requested_is_read() {
    for (kind, case) in [
        (Wire::Openai, "07_tool_result"),
        (Wire::Anthropic, "07_tool_result"),
        (Wire::Responses, "05_tool_result"),
        (Wire::Ollama, "05_tool_result"),
    ] {
        let (_service, served) =
            replay_client(kind, CannedResponse::recorded(wire_name(kind), case));
        let (reply, deltas) = complete_hello(&served, true).await;
        assert_eq!(reply.expect("a reply").message.content, deltas, "{kind:?}");
        let first = match kind {
            Wire::Responses => "The README",
            _ => "Rust 1.0",
        };
        assert!(deltas.starts_with(first), "{kind:?}");
    }
    for kind in [Wire::Openai, Wire::Responses, Wire::Anthropic] {
        let (_service, served) = replay_client(kind, recorded_stream(kind));
        let (reply, deltas) = complete_hello(&served, false).await;
        let reply = reply.expect("a reply");
        assert_eq!(
            (reply.message.tool_calls.len(), deltas.as_str()),
            (1, ""),
            "{kind:?}"
        );
    }
}

#[tokio::test]
async fn connections_are_reused() {
    for kind in WIRES {
        let (service, served) = replay_client(kind, recorded_stream(kind).in_chunks(500));
        for _ in 0..5 {
            complete_hello(&served, true).await.0.expect("a reply");
        }
        assert_eq!(service.connections(), 1, "{kind:?}");
    }
}

#[tokio::test]
async fn extra_fields_of_openais_wire_are_sent_back() {
    // Not recorded here, but as DeepSeek, OpenRouter and Gemini have it; OpenAI's own types do not know these fields.
    let call = json!({
        "index": 0, "id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"},
        "extra_content": {"google": {"thought_signature": "c2ln"}},
    });
    let said = json!({
        "role": "assistant", "content": null, "reasoning_content": "hm, ünd", "reasoning": "so",
        "reasoning_details": [{"type": "reasoning.text", "n": 1.0}], "tool_calls": [call],
    });
    let whole = json!({"choices": [{"message": said, "finish_reason": "tool_calls"}]}).to_string();
    let pieces = [
        json!({"reasoning_content": "hm, ", "reasoning": "so"}),
        json!({"reasoning_content": "ünd", "reasoning_details": [{"type": "reasoning.text", "n": 1.0}]}),
        json!({"tool_calls": [call]}),
    ]
    .map(|delta| format!("data: {}\n\n", json!({"choices": [{"delta": delta}]})));
    let streamed = pieces.concat() + "data: [DONE]\n\n";
    for (stream, first) in [
        (false, CannedResponse::json(200, &whole)),
        (
            true,
            CannedResponse::new(200, "text/event-stream", streamed),
        ),
    ] {
        let service =
            ReplayServer::start([first, CannedResponse::recorded("openai", "07_tool_result")]);
        let served = provider_handle(provider_config(Wire::Openai, &service.base_url()));
        let reply = complete_hello(&served, stream).await.0.expect("a reply");
        let results = vec![ToolResult::text("c", "2", false)];
        let messages = [
            Message::Assistant(reply.message),
            Message::Tool {
                tool_results: results,
            },
        ];
        complete_messages(&served, &messages, stream)
            .await
            .0
            .expect("a reply");
        let seen = service.requests().pop().expect("a request");
        let body: Value = serde_json::from_str(&seen.body).expect("JSON");
        let mut expected = said.clone();
        let call = expected["tool_calls"][0].as_object_mut().expect("a call");
        call.shift_remove("index");
        assert_eq!(body["messages"][0], expected, "streamed: {stream}");
    }
}
