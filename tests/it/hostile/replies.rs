//! Answers of services that no service should give: recorded ones that were mutilated, pieces put together at random,
//! any bytes. The rules are in `support/hostile/wires.rs`.

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use proptest::sample::{Index, select};

use crate::support::hostile::proptest_config;
use crate::support::hostile::wires::{KEY, MAX_REPLY, RawResponse, Wire, WireClients};

thread_local! {
    static SERVICES: WireClients = WireClients::new();
}

#[test]
fn recorded_replies_parse_the_same_for_any_chunks() {
    for (wire, body) in recorded() {
        for sent in [("text/event-stream", true), ("application/json", false)] {
            let (kind, stream) = sent;
            let sent = RawResponse {
                status: 200,
                kind,
                stream,
                body: body.clone(),
            };
            SERVICES.with(|services| services.check(wire, &sent, &[1, 7, 100, 1000]));
        }
    }
}

#[test]
fn a_reply_complete_before_the_size_limit_is_kept() {
    let end = "data: {\"choices\":[{\"delta\":{\"content\":\"hi\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";
    let sent = RawResponse {
        status: 200,
        kind: "text/event-stream",
        stream: true,
        body: format!("{end}{}", ": more\n".repeat(MAX_REPLY)).into(),
    };
    SERVICES.with(|services| services.check(Wire::OpenAi, &sent, &[end.len()]));
}

proptest! {
    #![proptest_config(proptest_config(256))]

    #[test]
    fn any_response_is_a_reply_or_an_error_for_any_chunks(
        (wire, sent) in sent(),
        cuts in prop::collection::vec(any::<usize>(), 0..12),
    ) {
        SERVICES.with(|services| services.check(wire, &sent, &cuts));
    }
}

fn sent() -> impl Strategy<Value = (Wire, RawResponse)> {
    let wires = || {
        select(vec![
            Wire::Anthropic,
            Wire::OpenAi,
            Wire::Responses,
            Wire::Ollama,
        ])
    };
    let mutilated = (select(recorded()), wounds()).prop_map(|((wire, mut body), wounds)| {
        wounds.iter().for_each(|wound| wound.strike(&mut body));
        (wire, body)
    });
    let composed = (wires(), prop::collection::vec(select(PIECES), 0..30));
    let composed = composed.prop_map(|(wire, pieces)| (wire, pieces.concat().into_bytes()));
    let anything = (wires(), prop::collection::vec(any::<u8>(), 0..200));
    let status = prop_oneof![6 => Just(200), 1 => 201_u16..600];
    let kind = select(vec![
        "text/event-stream",
        "application/x-ndjson",
        "application/json",
        "text/html",
        "",
    ]);
    let body = prop_oneof![4 => mutilated, 3 => composed, 1 => anything];
    (body, status, kind, any::<bool>()).prop_map(|((wire, body), status, kind, stream)| {
        let sent = RawResponse {
            status,
            kind,
            stream,
            body,
        };
        (wire, sent)
    })
}

/// What real servers answered.
fn recorded() -> Vec<(Wire, Vec<u8>)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recordings");
    let mut found = Vec::new();
    for (folder, wire) in [
        ("anthropic", Wire::Anthropic),
        ("openai", Wire::OpenAi),
        ("responses", Wire::Responses),
        ("ollama", Wire::Ollama),
    ] {
        let entries = fs::read_dir(root.join(folder)).expect("recordings");
        let mut paths: Vec<_> = entries
            .map(|entry| entry.expect("an entry").path())
            .collect();
        paths.sort();
        let is_body = |path: &&std::path::PathBuf| path.extension().is_some_and(|it| it != "http");
        let bodies = paths.iter().filter(is_body);
        found.extend(bodies.map(|path| (wire, fs::read(path).expect("a recording"))));
    }
    assert!(found.len() > 50, "{} recordings", found.len());
    found
}

/// Something done to a body.
#[derive(Clone, Debug)]
enum Wound {
    /// These bytes are removed.
    Cut(Index, usize),
    /// A byte is another one.
    Byte(Index, u8),
    /// A piece is put in.
    Insert(Index, &'static str),
    /// A part comes twice.
    Twice(Index, usize),
    /// The rest is missing.
    End(Index),
    /// A token is replaced by another one, at every position.
    Token(&'static str, &'static str),
    /// A part is repeated.
    Grow(Index, usize, usize),
}

fn wounds() -> impl Strategy<Value = Vec<Wound>> {
    let at = any::<Index>;
    let wound = prop_oneof![
        (at(), 1_usize..40).prop_map(|(at, length)| Wound::Cut(at, length)),
        (at(), any::<u8>()).prop_map(|(at, byte)| Wound::Byte(at, byte)),
        (at(), select(PIECES)).prop_map(|(at, piece)| Wound::Insert(at, piece)),
        (at(), 1_usize..300).prop_map(|(at, length)| Wound::Twice(at, length)),
        at().prop_map(Wound::End),
        (select(WORDS), select(WORDS)).prop_map(|(from, to)| Wound::Token(from, to)),
        (at(), 1_usize..40, 2_usize..2000)
            .prop_map(|(at, part, times)| Wound::Grow(at, part, times)),
    ];
    prop::collection::vec(wound, 0..5)
}

impl Wound {
    fn strike(&self, body: &mut Vec<u8>) {
        let place = |at: &Index| at.index(body.len() + 1);
        match self {
            Self::Cut(at, length) => {
                let at = place(at);
                body.drain(at..(at + length).min(body.len()));
            }
            Self::Byte(at, byte) => {
                let at = place(at);
                if let Some(place) = body.get_mut(at) {
                    *place = *byte;
                }
            }
            Self::Insert(at, piece) => {
                let at = place(at);
                body.splice(at..at, piece.bytes());
            }
            Self::Twice(at, length) => {
                let at = place(at);
                let part = body[at..(at + length).min(body.len())].to_vec();
                body.splice(at..at, part);
            }
            Self::End(at) => body.truncate(place(at)),
            Self::Token(from, to) => {
                let text = String::from_utf8_lossy(body).replace(from, to);
                *body = text.into_bytes();
            }
            Self::Grow(at, part, times) => {
                let at = place(at);
                let part = body[at..(at + part).min(body.len())].repeat(*times);
                body.splice(at..at, part);
            }
        }
    }
}

/// Words that mean something on some wire, and values of every type.
const WORDS: &[&str] = &[
    "\"content\"",
    "\"text\"",
    "\"input\"",
    "\"delta\"",
    "\"message\"",
    "\"choices\"",
    "\"error\"",
    "\"index\"",
    "\"tool_calls\"",
    "\"tool_use\"",
    "\"function\"",
    "\"arguments\"",
    "\"id\"",
    "\"usage\"",
    "\"thinking\"",
    "\"type\"",
    "\"message_start\"",
    "\"content_block_start\"",
    "\"content_block_delta\"",
    "\"message_stop\"",
    "null",
    "true",
    "0",
    "-1",
    "18446744073709551615",
    "1e999",
    "\"\"",
    "[]",
    "{}",
    "[[[[",
    "\"\\ud800\"",
    "data: ",
    "event: ",
    "[DONE]",
    "\n",
    "\r\n",
    "\"stop\"",
    "\"done\"",
    "\"model\"",
    "\"output\"",
    "\"item\"",
    "\"item_id\"",
    "\"output_index\"",
    "\"call_id\"",
    "\"reasoning\"",
    "\"response.completed\"",
    "\"response.output_item.added\"",
    "\"response.output_item.done\"",
    "\"response.output_text.delta\"",
];

/// Parts of bodies, whole and broken.
const PIECES: &[&str] = &[
    "data: ",
    "data:",
    "event: x\n",
    ": hi\n",
    "\n",
    "\r",
    "\r\n",
    "\n\n",
    "\u{feff}",
    "[DONE]",
    KEY,
    "{",
    "}",
    "null",
    "{\"error\":{\"message\":\"sk-hostile-1234567890 is wrong\",\"type\":\"overloaded_error\"}}",
    "{\"error\":\"sk-hostile-1234567890\"}",
    "{\"type\":\"message_start\",\"message\":{\"content\":[{\"type\":\"text\",\"text\":\"a\"}],\"usage\":{\"input_tokens\":1}}}",
    "{\"type\":\"content_block_start\",\"index\":0,\"content_block\":{\"type\":\"text\",\"text\":\"b\"}}",
    "{\"type\":\"content_block_start\",\"index\":1,\"content_block\":{\"type\":\"tool_use\",\"id\":\"\",\"name\":\"t\"}}",
    "{\"type\":\"content_block_start\",\"index\":2,\"content_block\":{\"type\":\"thinking\",\"thinking\":\"\"}}",
    "{\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"text\":\"\u{e4}\u{1f980}\"}}",
    "{\"type\":\"content_block_delta\",\"index\":1,\"delta\":{\"partial_json\":\"{\\\"a\\\":1\"}}",
    "{\"type\":\"content_block_delta\",\"index\":1,\"delta\":{\"text\":\"to a call\"}}",
    "{\"type\":\"content_block_delta\",\"index\":2,\"delta\":{\"thinking\":\"hm\",\"signature\":\"s\"}}",
    "{\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\"usage\":{\"output_tokens\":7}}",
    "{\"type\":\"message_stop\"}",
    "{\"choices\":[{\"delta\":{\"content\":\"hi\"}}]}",
    "{\"choices\":[{\"message\":{\"content\":[{\"text\":\"a\"},{}],\"refusal\":\"no\"},\"finish_reason\":\"stop\"}]}",
    "{\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0,\"id\":\"a\",\"function\":{\"name\":\"t\",\"arguments\":\"{\"}}]}}]}",
    "{\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0,\"function\":{\"arguments\":\"}\"}},{}]}}]}",
    "{\"choices\":[{\"delta\":{\"tool_calls\":[{\"function\":{\"arguments\":{\"b\":2}},\"extra_content\":1}]}}]}",
    "{\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"prompt_tokens_details\":{\"cached_tokens\":9}}}",
    "{\"message\":{\"content\":\"hi\",\"thinking\":\"hm\",\"tool_calls\":[{\"function\":{\"name\":\"t\",\"arguments\":{}}}]}}\n",
    "{\"message\":{\"tool_calls\":[{}, {\"function\":{\"arguments\":\"{\\\"a\\\":[]}\"}}]}}\n",
    "{\"type\":\"response.output_item.added\",\"output_index\":0,\"item\":{\"type\":\"message\",\"id\":\"m\",\"content\":[]}}",
    "{\"type\":\"response.output_item.added\",\"item\":{\"type\":\"function_call\",\"id\":\"f\",\"call_id\":\"\",\"name\":\"t\"}}",
    "{\"type\":\"response.output_text.delta\",\"output_index\":0,\"item_id\":\"m\",\"delta\":\"\u{e4}\u{1f980}\"}",
    "{\"type\":\"response.refusal.delta\",\"item_id\":\"m\",\"delta\":\"no\"}",
    "{\"type\":\"response.function_call_arguments.delta\",\"item_id\":\"f\",\"delta\":\"{\\\"a\\\":1\"}",
    "{\"type\":\"response.output_item.done\",\"output_index\":0,\"item\":{\"type\":\"message\",\"id\":\"m\",\"phase\":\"commentary\",\"content\":[{\"type\":\"output_text\",\"text\":\"\u{e4}bc\"},{\"refusal\":\"no\"}]}}",
    "{\"type\":\"response.output_item.done\",\"output_index\":1,\"item\":{\"type\":\"reasoning\",\"id\":\"r\",\"summary\":[],\"encrypted_content\":\"gA\"}}",
    "{\"type\":\"response.output_item.done\",\"item\":{\"type\":\"function_call\",\"id\":\"f\",\"call_id\":\"c\",\"name\":\"t\",\"arguments\":\"{}\"}}",
    "{\"type\":\"response.completed\",\"response\":{\"status\":\"completed\",\"output\":[{\"type\":\"message\",\"content\":\"x\"}],\"usage\":{\"input_tokens\":5,\"input_tokens_details\":{\"cached_tokens\":9}}}}",
    "{\"type\":\"response.failed\",\"response\":{\"status\":\"failed\",\"error\":{\"code\":\"server_error\",\"message\":\"sk-hostile-1234567890\"}}}",
    "{\"type\":\"error\",\"code\":\"rate_limit_exceeded\",\"message\":\"slow\"}",
    "{\"done\":true,\"done_reason\":\"stop\",\"eval_count\":3}\n",
];
