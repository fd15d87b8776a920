//! The fake provider: a real HTTP server that speaks Anthropic's, OpenAI's two and Ollama's wires from a script, keeps what
//! it received and what it charged for, and notices when the other side hangs up.

pub mod answer;
pub mod batches;
pub mod recorded_request;
pub mod wires;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::HeaderMap;
use axum::http::header::CONTENT_TYPE;
use axum::response::Response;
use axum::routing::post;
use futures_util::stream;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::support::gate::Gate;
use crate::support::provider::answer::{Content, Ending, ScriptedAnswer, Tokens, fails, says};
use crate::support::provider::batches::BatchStore;
use crate::support::provider::recorded_request::{RecordedRequest, Wire};
use crate::support::provider::wires::EncodedAnswer;
use crate::support::within_timeout;

/// The provider of one story.
pub struct FakeProvider {
    /// Where it listens.
    pub address: SocketAddr,
    /// Its batches.
    pub batches: BatchStore,
    book: SharedState,
    _server: JoinSet<()>,
}

impl FakeProvider {
    /// Starts one on a free port.
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let (book, batches) = (SharedState::default(), BatchStore::default());
        let routes = Router::new()
            .route("/v1/messages", post(anthropic))
            .route("/v1/chat/completions", post(openai))
            .route("/v1/responses", post(responses))
            .route("/api/chat", post(ollama))
            .with_state(book.clone())
            .merge(batches.routes(book.clone()));
        let mut server = JoinSet::new();
        server.spawn(async move { axum::serve(listener, routes).await.expect("serve") });
        Self {
            address,
            batches,
            book,
            _server: server,
        }
    }

    /// Its address as a URL, without a path.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Queues answers to requests for `model`; each is used once, in this order.
    pub fn will(&self, model: &str, answers: impl IntoIterator<Item = ScriptedAnswer>) {
        self.book.write(|pages| {
            pages
                .scripts
                .entry(model.to_owned())
                .or_default()
                .next
                .extend(answers);
        });
    }

    /// Answers every request for `model` for which no answer is queued.
    pub fn always(
        &self,
        model: &str,
        rule: impl Fn(&RecordedRequest) -> ScriptedAnswer + Send + Sync + 'static,
    ) {
        self.book.write(|pages| {
            pages.scripts.entry(model.to_owned()).or_default().rule = Some(Arc::new(rule));
        });
    }

    /// As [`Self::always`], with this text once the gate is open.
    pub fn always_later(&self, model: &str, text: &'static str) -> Gate {
        let gate = Gate::closed();
        let door = gate.clone();
        self.always(model, move |_| says(text).after_gate(&door));
        gate
    }

    /// All requests so far.
    pub fn requests(&self) -> Vec<Arc<RecordedRequest>> {
        self.book.read(|pages| pages.requests.clone())
    }

    /// The requests for `model` so far.
    pub fn requests_for(&self, model: &str) -> Vec<Arc<RecordedRequest>> {
        let mut seen = self.requests();
        seen.retain(|request| request.model() == model);
        seen
    }

    /// Waits for the `count`th request for `model`, counted from 1.
    pub async fn wait_for_request(&self, model: &str, count: usize) -> Arc<RecordedRequest> {
        let nth = |pages: &ProviderState| {
            pages
                .requests
                .iter()
                .filter(|request| request.model() == model)
                .nth(count - 1)
                .cloned()
        };
        self.wait_until(&format!("request {count} for {model}"), nth)
            .await
    }

    /// The number of polls of batches.
    pub fn batch_polls(&self) -> usize {
        self.book.read(|pages| pages.batch_polls)
    }

    /// Waits for so many polls of batches.
    pub async fn wait_for_batch_polls(&self, count: usize) {
        let enough = |pages: &ProviderState| (pages.batch_polls >= count).then_some(());
        self.wait_until(&format!("{count} looks at batches"), enough)
            .await;
    }

    /// Waits until that many batches were created.
    pub async fn wait_for_batches(&self, count: usize) {
        let enough = |pages: &ProviderState| (pages.batches >= count).then_some(());
        self.wait_until(&format!("{count} batches"), enough).await;
    }

    /// Waits until there have been `count` requests, whatever the model.
    pub async fn wait_for_requests(&self, count: usize) {
        let enough = |pages: &ProviderState| (pages.requests.len() >= count).then_some(());
        self.wait_until(&format!("request {count}"), enough).await;
    }

    /// Waits until `count` requests for `model` are in progress at the same time.
    pub async fn wait_for_concurrency(&self, model: &str, count: usize) {
        let enough = |pages: &ProviderState| (pages.busy(model).now >= count).then_some(());
        self.wait_until(&format!("{count} requests for {model} at once"), enough)
            .await;
    }

    /// Waits until the client has disconnected from `count` answers.
    pub async fn wait_for_disconnects(&self, count: usize) {
        let enough = |pages: &ProviderState| (pages.disconnects >= count).then_some(());
        self.wait_until(&format!("{count} connections closed early"), enough)
            .await;
    }

    /// Most requests for `model` that were being answered at once.
    pub fn max_concurrency(&self, model: &str) -> usize {
        self.book.read(|pages| pages.busy(model).max)
    }

    /// The usage charged so far. It counts once the end of its answer is sent.
    pub fn ledger(&self) -> Ledger {
        self.book.read(|pages| pages.ledger)
    }

    async fn wait_until<T>(&self, what: &str, look: impl Fn(&ProviderState) -> Option<T>) -> T {
        let mut changes = self.book.changed.subscribe();
        within_timeout(what, async {
            loop {
                if let Some(found) = self.book.read(&look) {
                    return found;
                }
                changes.changed().await.expect("the book is kept");
            }
        })
        .await
    }
}

/// The charged usage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    /// Replies whose end was sent.
    pub replies: u64,
    /// Their input, cached tokens included.
    pub input: u64,
    /// Their output.
    pub output: u64,
}

/// The queued answers and the recorded requests.
#[derive(Default)]
struct ProviderState {
    scripts: HashMap<String, Script>,
    requests: Vec<Arc<RecordedRequest>>,
    ledger: Ledger,
    busy: HashMap<String, Concurrency>,
    disconnects: usize,
    batches: usize,
    batch_polls: usize,
}

impl ProviderState {
    fn busy(&self, model: &str) -> Concurrency {
        self.busy.get(model).copied().unwrap_or_default()
    }
}

type Rule = Arc<dyn Fn(&RecordedRequest) -> ScriptedAnswer + Send + Sync>;

#[derive(Default)]
struct Script {
    next: VecDeque<ScriptedAnswer>,
    rule: Option<Rule>,
}

#[derive(Clone, Copy, Default)]
struct Concurrency {
    now: usize,
    max: usize,
}

/// The recorded requests behind a lock, with a notification at every change.
#[derive(Clone, Default)]
struct SharedState {
    state: Arc<Mutex<ProviderState>>,
    changed: Arc<watch::Sender<u64>>,
}

impl SharedState {
    fn read<T>(&self, look: impl FnOnce(&ProviderState) -> T) -> T {
        look(
            &self
                .state
                .lock()
                .expect("no story fails with the book open"),
        )
    }

    fn write<T>(&self, change: impl FnOnce(&mut ProviderState) -> T) -> T {
        let result = change(
            &mut self
                .state
                .lock()
                .expect("no story fails with the book open"),
        );
        self.changed.send_modify(|version| *version += 1);
        result
    }

    /// Enters a request of a batch, which is not being answered at once.
    fn record_batch_request(
        &self,
        wire: Wire,
        headers: HeaderMap,
        body: &[u8],
    ) -> (Arc<RecordedRequest>, ScriptedAnswer) {
        let (seen, answer) = self.record_request(wire, headers, body);
        self.write(|pages| {
            pages.busy.entry(seen.model().to_owned()).or_default().now -= 1;
        });
        (seen, answer)
    }

    /// Enters a request and finds its answer.
    fn record_request(
        &self,
        wire: Wire,
        headers: HeaderMap,
        body: &[u8],
    ) -> (Arc<RecordedRequest>, ScriptedAnswer) {
        let (seen, answer, rule) = self.write(|pages| {
            let seen = Arc::new(RecordedRequest {
                number: pages.requests.len(),
                wire,
                headers,
                body: serde_json::from_slice(body).unwrap_or_default(),
                bytes: Bytes::copy_from_slice(body),
            });
            pages.requests.push(seen.clone());
            let busy = pages.busy.entry(seen.model().to_owned()).or_default();
            busy.now += 1;
            busy.max = busy.max.max(busy.now);
            let script = pages.scripts.entry(seen.model().to_owned()).or_default();
            let answer = script.next.pop_front();
            (seen, answer, script.rule.clone())
        });
        // A rule is the story's own code and may look into the book: it runs with the book shut.
        let answer = answer
            .or_else(|| rule.map(|rule| rule(&seen)))
            .unwrap_or_else(|| fails(400, format!("no answer was scripted for {}", seen.model())));
        (seen, answer)
    }
}

/// An answer in progress. If it is dropped before its end, the client has disconnected.
struct ActiveAnswer {
    book: SharedState,
    model: String,
    usage: Option<Tokens>,
    is_over: bool,
}

impl ActiveAnswer {
    /// Counts the answer before its last piece is sent, so that every client that has it finds it counted.
    fn end(&mut self, complete: bool) {
        self.is_over = true;
        let usage = self.usage.filter(|_| complete);
        self.book.write(|pages| {
            pages.busy.entry(self.model.clone()).or_default().now -= 1;
            if let Some(tokens) = usage {
                pages.ledger.replies += 1;
                pages.ledger.input += tokens.total_input();
                pages.ledger.output += tokens.output;
            }
        });
    }
}

impl Drop for ActiveAnswer {
    fn drop(&mut self) {
        if !self.is_over {
            self.end(false);
            self.book.write(|pages| pages.disconnects += 1);
        }
    }
}

async fn anthropic(State(book): State<SharedState>, headers: HeaderMap, body: Bytes) -> Response {
    answer(book, Wire::Anthropic, headers, &body).await
}

async fn openai(State(book): State<SharedState>, headers: HeaderMap, body: Bytes) -> Response {
    answer(book, Wire::Openai, headers, &body).await
}

async fn responses(State(book): State<SharedState>, headers: HeaderMap, body: Bytes) -> Response {
    answer(book, Wire::Responses, headers, &body).await
}

async fn ollama(State(book): State<SharedState>, headers: HeaderMap, body: Bytes) -> Response {
    answer(book, Wire::Ollama, headers, &body).await
}

async fn answer(book: SharedState, wire: Wire, headers: HeaderMap, body: &[u8]) -> Response {
    let (seen, answer) = book.record_request(wire, headers, body);
    let is_reply = matches!(answer.content, Content::Reply { .. });
    let mut under_way = ActiveAnswer {
        book,
        model: seen.model().to_owned(),
        usage: answer.usage.filter(|_| is_reply),
        is_over: false,
    };
    if let Some(gate) = &answer.start_gate {
        gate.wait_until_open().await;
    }
    let written = wires::encode(&seen, &answer);
    if wire == Wire::Responses && is_reply {
        save_reply(&seen, &written);
    }
    let EncodedAnswer {
        status,
        kind,
        pieces,
        first_pieces: first,
        filler,
    } = written;
    let body =
        if answer.ending == Ending::Whole && answer.resume_gate.is_none() && !seen.wants_stream() {
            under_way.end(true);
            Body::from(pieces.concat())
        } else {
            Body::from_stream(stream::unfold(
                AnswerStream {
                    steps: steps(pieces, first, filler, &answer),
                    active: under_way,
                },
                AnswerStream::next,
            ))
        };
    let mut response = Response::builder()
        .status(status)
        .header(CONTENT_TYPE, kind);
    for (name, value) in &answer.headers {
        response = response.header(*name, value);
    }
    response.body(body).expect("a response")
}

/// One thing that an answer does on its way.
enum Step {
    Send(Bytes),
    SendForEver(Bytes),
    Wait(Gate),
    Break,
}

fn steps(
    pieces: Vec<Bytes>,
    first: usize,
    filler: Bytes,
    answer: &ScriptedAnswer,
) -> VecDeque<Step> {
    let mut pieces = pieces.into_iter();
    let mut steps: VecDeque<_> = pieces.by_ref().take(first).map(Step::Send).collect();
    steps.extend(answer.resume_gate.clone().map(Step::Wait));
    match answer.ending {
        Ending::Whole => {
            let last = pieces.next_back().map(Step::Send);
            steps.extend(pieces.map(Step::Send));
            steps.extend(answer.last_gate.clone().map(Step::Wait));
            steps.extend(last);
        }
        Ending::Cut => {
            let torn = pieces.next().unwrap_or_default();
            steps.push_back(Step::Send(torn.slice(..torn.len() / 2)));
            steps.push_back(Step::Break);
        }
        Ending::Endless => steps.push_back(Step::SendForEver(filler)),
    }
    steps
}

/// An answer that is sent in pieces.
struct AnswerStream {
    steps: VecDeque<Step>,
    active: ActiveAnswer,
}

impl AnswerStream {
    async fn next(mut self) -> Option<(io::Result<Bytes>, Self)> {
        loop {
            // The server writes out what it has when a body makes it wait: each piece goes its own way, before a break too.
            tokio::task::yield_now().await;
            match self.steps.pop_front()? {
                Step::Send(piece) => {
                    if self.steps.is_empty() {
                        self.active.end(true);
                    }
                    return Some((Ok(piece), self));
                }
                Step::SendForEver(piece) => {
                    self.steps.push_front(Step::SendForEver(piece.clone()));
                    return Some((Ok(piece), self));
                }
                Step::Wait(gate) => gate.wait_until_open().await,
                Step::Break => {
                    self.active.end(false);
                    return Some((Err(io::ErrorKind::ConnectionReset.into()), self));
                }
            }
        }
    }
}

/// Writes a reply of this provider's own down for `tests/validate_wire.sh`, which sets `AXED_KEEP_REPLIES`.
fn save_reply(seen: &RecordedRequest, written: &EncodedAnswer) {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let Some(folder) = axed::config::environment::process_environment().remove("AXED_KEEP_REPLIES")
    else {
        return;
    };
    let ending = match seen.wants_stream() {
        true => "sse",
        false => "json",
    };
    let count = COUNT.fetch_add(1, Ordering::SeqCst);
    let file = Path::new(&folder).join(format!("responses-{count:03}.{ending}"));
    std::fs::write(file, written.pieces.concat()).expect("a folder for replies");
}
