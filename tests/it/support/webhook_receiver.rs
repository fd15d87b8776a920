//! A receiver of webhooks: a real HTTP server that keeps what it gets, responds as configured, and checks signatures with
//! somebody else's library.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{OriginalUri, State};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use standardwebhooks::Webhook;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::support::gate::Gate;
use crate::support::within_timeout;

/// How the receiver answers.
#[derive(Clone)]
pub enum ReceiverReply {
    /// With this status.
    Status(u16),
    /// With a redirect to this place.
    Redirect(String),
    /// With 200, once the gate is open.
    After(Gate),
}

/// A message as it came.
#[derive(Clone, Debug)]
pub struct ReceivedMessage {
    /// The path and the query.
    pub uri: Uri,
    /// The headers.
    pub headers: HeaderMap,
    /// The bytes of the body.
    pub body: Bytes,
}

impl ReceivedMessage {
    /// A header.
    pub fn header(&self, name: &str) -> &str {
        let value = self.headers.get(name).and_then(|value| value.to_str().ok());
        value.unwrap_or_else(|| panic!("{name} is missing in {:?}", self.headers))
    }

    /// The body.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("JSON")
    }

    /// Whether its signature is right by an independent implementation, its timestamp included.
    pub fn is_signed_by(&self, secret: &str) -> bool {
        let oracle = Webhook::new(secret).expect("a secret");
        oracle.verify(&self.body, &self.headers).is_ok()
    }
}

#[derive(Default)]
struct ReceiverState {
    replies: VecDeque<ReceiverReply>,
    messages: Vec<ReceivedMessage>,
}

/// A receiver of one's own. Goes away with the story.
pub struct WebhookReceiver {
    /// Where it listens.
    pub address: SocketAddr,
    state: Arc<watch::Sender<ReceiverState>>,
    _server: JoinSet<()>,
}

impl WebhookReceiver {
    /// Starts one on a free port.
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let book = Arc::new(watch::Sender::new(ReceiverState::default()));
        let routes = Router::new()
            .fallback(receive)
            .with_state(Arc::clone(&book));
        let mut server = JoinSet::new();
        server.spawn(async move { axum::serve(listener, routes).await.expect("serve") });
        Self {
            address,
            state: book,
            _server: server,
        }
    }

    /// Its address with this path.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// The next answers, each given once; then it answers 200.
    pub fn will(&self, replies: impl IntoIterator<Item = ReceiverReply>) {
        self.state.send_modify(|book| book.replies.extend(replies));
    }

    /// Waits until that many messages have arrived, and returns all of them.
    pub async fn wait_for_messages(&self, count: usize) -> Vec<ReceivedMessage> {
        let mut book = self.state.subscribe();
        let enough = book.wait_for(|book| book.messages.len() >= count);
        let book = within_timeout(&format!("message {count}"), enough).await;
        book.expect("it lives").messages.clone()
    }

    /// The messages so far.
    pub fn messages(&self) -> Vec<ReceivedMessage> {
        self.state.borrow().messages.clone()
    }
}

async fn receive(
    State(book): State<Arc<watch::Sender<ReceiverState>>>,
    OriginalUri(uri): OriginalUri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let mut reply = None;
    book.send_modify(|book| {
        book.messages.push(ReceivedMessage { uri, headers, body });
        reply = book.replies.pop_front();
    });
    match reply.unwrap_or(ReceiverReply::Status(200)) {
        ReceiverReply::Status(status) => StatusCode::from_u16(status)
            .expect("a status")
            .into_response(),
        ReceiverReply::Redirect(to) => (StatusCode::FOUND, [("location", to)]).into_response(),
        ReceiverReply::After(gate) => {
            gate.wait_until_open().await;
            StatusCode::OK.into_response()
        }
    }
}
