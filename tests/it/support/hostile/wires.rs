//! What must hold of a service's answer, whatever its bytes and however the network cuts them: a reply or a classified
//! error, the same for every cut, within bounds, without our key.

use std::collections::BTreeMap;
use std::fmt;

use axed::config::{Provider, ProviderKind};
use axed::providers::anthropic::Anthropic;
use axed::providers::http_client::transport::HttpResponse;
use axed::providers::ollama::Ollama;
use axed::providers::openai_chat::{self, OpenAiChat};
use axed::providers::openai_responses::OpenAiResponses;
use axed::providers::openai_service::OpenAiService;
use axed::providers::tool_call_codec::MAX_CALLS;
use axed::providers::{Delta, ProviderError, Reply};
use bytes::Bytes;
use tokio::runtime::{Builder, Runtime};

/// The key that the clients come with. No error may repeat it.
pub const KEY: &str = "sk-hostile-1234567890";
/// Most bytes of a reply: little, so that answers come above it.
pub const MAX_REPLY: usize = 16 << 10;
/// Maximum bytes of an error's message, which is written to the record, the log and the response.
const MAX_ERROR: usize = 4 << 10;

/// One client of each wire.
pub struct WireClients {
    runtime: Runtime,
    anthropic: Anthropic,
    openai: OpenAiChat,
    responses: OpenAiResponses,
    ollama: Ollama,
}

/// The wires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    /// Anthropic's.
    Anthropic,
    /// OpenAI's chat.
    OpenAi,
    /// OpenAI's Responses.
    Responses,
    /// Ollama's.
    Ollama,
}

/// An answer as it comes from outside.
#[derive(Clone)]
pub struct RawResponse {
    /// HTTP's status.
    pub status: u16,
    /// The content type.
    pub kind: &'static str,
    /// Whether a stream was requested.
    pub stream: bool,
    /// The body.
    pub body: Vec<u8>,
}

impl fmt::Debug for RawResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let body = self.body[..self.body.len().min(600)].escape_ascii();
        write!(
            f,
            "{} {:?} {} {} bytes: {body}",
            self.status,
            self.kind,
            self.stream,
            self.body.len()
        )
    }
}

/// What a response became: every field of the reply as text, and its deltas.
#[derive(Debug, PartialEq)]
struct ParsedReply {
    reply: Result<String, ProviderError>,
    deltas: String,
}

impl WireClients {
    /// Clients that never connect.
    pub fn new() -> Self {
        let config = |kind| Provider {
            kind,
            api_key: Some(KEY.to_owned().into()),
            key_env: String::new(),
            base_url: Some("http://127.0.0.1:9".to_owned()),
            headers: BTreeMap::new(),
            max_concurrent: None,
            timeout: None,
            version: None,
            max_tokens_field: None,
            api: None,
            max_reply: MAX_REPLY,
            batch_poll: axed::config::DEFAULT_BATCH_POLL,
            services: Vec::new(),
            scripts: Vec::new(),
            is_preset: false,
            missing_address: None,
            limits: BTreeMap::new(),
            models: Default::default(),
        };
        let runtime = Builder::new_current_thread().enable_all().build();
        let mark = || "mark".to_owned();
        let config_of_openai = config(ProviderKind::Openai);
        let base = openai_chat::base_url(&config_of_openai).expect("an address");
        let service = OpenAiService::new("mine", base.host());
        let openai = || OpenAiChat::new(mark(), service, &config_of_openai).expect("a client");
        Self {
            runtime: runtime.expect("a runtime"),
            anthropic: Anthropic::new(mark(), &config(ProviderKind::Anthropic)).expect("a client"),
            openai: openai(),
            responses: OpenAiResponses::new(mark(), &base, openai()).expect("an address"),
            ollama: Ollama::new(mark(), &config(ProviderKind::Ollama)).expect("a client"),
        }
    }

    /// Checks everything that must hold of this answer; `cuts` are any numbers.
    pub fn check(&self, wire: Wire, response: &RawResponse, cuts: &[usize]) {
        let (reply, deltas) =
            self.read_reply(wire, response, [Bytes::from(response.body.clone())].into());
        match &reply {
            Ok(reply) => assert_valid(wire, response, reply, &deltas),
            Err(error) => {
                assert!(error.message.len() <= MAX_ERROR, "{error}");
                assert!(!error.message.contains(KEY), "{error}");
            }
        }
        let whole = ParsedReply::new(reply, deltas);
        let every: Vec<_> = (0..response.body.len().min(200)).collect();
        for cuts in [cuts, &every] {
            let (reply, deltas) = self.read_reply(wire, response, split_at(&response.body, cuts));
            let in_pieces = ParsedReply::new(reply, deltas);
            assert_eq!(in_pieces, whole, "cut at {cuts:?}: {response:?}");
        }
    }

    fn read_reply(
        &self,
        wire: Wire,
        response: &RawResponse,
        chunks: Vec<Bytes>,
    ) -> (Result<Reply, ProviderError>, String) {
        let mut text = String::new();
        let deltas = &mut |delta: Delta<'_>| {
            if let Delta::Text(delta) = delta {
                text.push_str(delta);
            }
        };
        let reply = self.runtime.block_on(async {
            let http_response =
                HttpResponse::from_chunks(response.status, response.kind, chunks).expect("a head");
            let (model, stream) = ("model", response.stream);
            match wire {
                Wire::Anthropic => {
                    self.anthropic
                        .endpoint()
                        .read_response(http_response, model, stream, deltas)
                        .await
                }
                Wire::OpenAi => {
                    self.openai
                        .endpoint()
                        .read_response(http_response, model, stream, deltas)
                        .await
                }
                Wire::Responses => {
                    self.responses
                        .endpoint()
                        .read_response(http_response, model, stream, deltas)
                        .await
                }
                Wire::Ollama => {
                    self.ollama
                        .endpoint()
                        .read_response(http_response, model, stream, deltas)
                        .await
                }
            }
        });
        (reply, text)
    }
}

impl ParsedReply {
    fn new(reply: Result<Reply, ProviderError>, deltas: String) -> Self {
        Self {
            reply: reply.map(|reply| format!("{reply:?}")),
            deltas,
        }
    }
}

fn assert_valid(wire: Wire, response: &RawResponse, reply: &Reply, deltas: &str) {
    let message = &reply.message;
    assert!((200..300).contains(&response.status), "{reply:?}");
    assert!(message.tool_calls.len() <= MAX_CALLS);
    for call in &message.tool_calls {
        let arguments: Result<serde_json::Map<_, _>, _> =
            serde_json::from_str(call.arguments.get());
        // Deeper than serde reads is still JSON.
        let fine = match &arguments {
            Ok(_) => true,
            Err(why) => why.to_string().contains("recursion limit"),
        };
        assert!(fine, "{call:?}");
        assert!(!call.id.is_empty(), "{call:?}");
    }
    // A byte that is not UTF-8 becomes three.
    let most = 3 * response.body.len();
    assert!(message.content.len() <= most, "{reply:?}");
    let echo = message
        .echo
        .as_ref()
        .map_or(0, |echo| echo.body.get().len());
    assert!(
        echo <= 8 * most + 1000,
        "{echo} bytes from {}",
        response.body.len()
    );
    match (response.stream, wire) {
        (false, _) => assert_eq!(deltas, ""),
        // Its blocks may come in pieces that are mixed.
        (true, Wire::Anthropic) => assert_eq!(deltas.len(), message.content.len(), "{reply:?}"),
        (true, _) => assert_eq!(deltas, message.content),
    }
}

/// The body in chunks that begin at these places.
fn split_at(body: &[u8], cuts: &[usize]) -> Vec<Bytes> {
    let mut cuts: Vec<_> = cuts.iter().map(|cut| cut % (body.len() + 1)).collect();
    cuts.extend([0, body.len()]);
    cuts.sort_unstable();
    let chunks = cuts.windows(2);
    chunks
        .map(|pair| Bytes::copy_from_slice(&body[pair[0]..pair[1]]))
        .collect()
}
