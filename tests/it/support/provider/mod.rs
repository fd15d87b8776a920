//! The fake provider: a real HTTP server that speaks Anthropic's, OpenAI's two and Ollama's wires from a script, keeps what
//! it was asked and what it charged for, and notices when the other side hangs up.

pub mod answer;
pub mod batches;
pub mod seen;
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
use crate::support::provider::answer::{Answer, Content, Ending, Tokens, fails};
use crate::support::provider::batches::Shelf;
use crate::support::provider::seen::{Seen, Wire};
use crate::support::provider::wires::Written;
use crate::support::soon;

/// A provider of one's own. Goes away with the story.
pub struct FakeProvider {
    /// Where it listens.
    pub address: SocketAddr,
    /// Its batches.
    pub batches: Shelf,
    book: Book,
    _server: JoinSet<()>,
}

impl FakeProvider {
    /// Starts one on a free port.
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let (book, batches) = (Book::default(), Shelf::default());
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

    /// The next answers to requests for `model`, each given once, in this order.
    pub fn will(&self, model: &str, answers: impl IntoIterator<Item = Answer>) {
        self.book.write(|pages| {
            pages
                .scripts
                .entry(model.to_owned())
                .or_default()
                .next
                .extend(answers);
        });
    }

    /// The answer to every request for `model` that has no answer of its own waiting.
    pub fn always(&self, model: &str, rule: impl Fn(&Seen) -> Answer + Send + Sync + 'static) {
        self.book.write(|pages| {
            pages.scripts.entry(model.to_owned()).or_default().rule = Some(Arc::new(rule));
        });
    }

    /// All requests so far.
    pub fn seen(&self) -> Vec<Arc<Seen>> {
        self.book.read(|pages| pages.seen.clone())
    }

    /// The requests for `model` so far.
    pub fn seen_by(&self, model: &str) -> Vec<Arc<Seen>> {
        let mut seen = self.seen();
        seen.retain(|request| request.model() == model);
        seen
    }

    /// Waits for the `count`th request for `model`, counted from 1.
    pub async fn asked(&self, model: &str, count: usize) -> Arc<Seen> {
        let nth = |pages: &Pages| {
            pages
                .seen
                .iter()
                .filter(|request| request.model() == model)
                .nth(count - 1)
                .cloned()
        };
        self.until(&format!("request {count} for {model}"), nth)
            .await
    }

    /// How often a batch was looked at.
    pub fn looks(&self) -> usize {
        self.book.read(|pages| pages.looks)
    }

    /// Waits until batches were looked at so often.
    pub async fn looked(&self, count: usize) {
        let enough = |pages: &Pages| (pages.looks >= count).then_some(());
        self.until(&format!("{count} looks at batches"), enough)
            .await;
    }

    /// Waits until so many batches were made.
    pub async fn made(&self, count: usize) {
        let enough = |pages: &Pages| (pages.batches >= count).then_some(());
        self.until(&format!("{count} batches"), enough).await;
    }

    /// Waits until there have been `count` requests, whatever the model.
    pub async fn asked_in_all(&self, count: usize) {
        let enough = |pages: &Pages| (pages.seen.len() >= count).then_some(());
        self.until(&format!("request {count}"), enough).await;
    }

    /// Waits until `count` requests for `model` are being answered at once.
    pub async fn busy(&self, model: &str, count: usize) {
        let enough = |pages: &Pages| (pages.busy(model).now >= count).then_some(());
        self.until(&format!("{count} requests for {model} at once"), enough)
            .await;
    }

    /// Waits until the other side has hung up on `count` answers.
    pub async fn hung_up(&self, count: usize) {
        let enough = |pages: &Pages| (pages.hung_up >= count).then_some(());
        self.until(&format!("{count} connections closed early"), enough)
            .await;
    }

    /// Most requests for `model` that were being answered at once.
    pub fn most_busy(&self, model: &str) -> usize {
        self.book.read(|pages| pages.busy(model).most)
    }

    /// What it has charged for so far: usage counts when the end of its answer is sent.
    pub fn ledger(&self) -> Ledger {
        self.book.read(|pages| pages.ledger)
    }

    async fn until<T>(&self, what: &str, look: impl Fn(&Pages) -> Option<T>) -> T {
        let mut changes = self.book.changed.subscribe();
        soon(what, async {
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

/// What was charged for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    /// Replies whose end was sent.
    pub replies: u64,
    /// Their input, cached tokens included.
    pub input: u64,
    /// Their output.
    pub output: u64,
}

/// What the provider is to say and what has happened.
#[derive(Default)]
struct Pages {
    scripts: HashMap<String, Script>,
    seen: Vec<Arc<Seen>>,
    ledger: Ledger,
    busy: HashMap<String, Busy>,
    hung_up: usize,
    batches: usize,
    looks: usize,
}

impl Pages {
    fn busy(&self, model: &str) -> Busy {
        self.busy.get(model).copied().unwrap_or_default()
    }
}

type Rule = Arc<dyn Fn(&Seen) -> Answer + Send + Sync>;

#[derive(Default)]
struct Script {
    next: VecDeque<Answer>,
    rule: Option<Rule>,
}

#[derive(Clone, Copy, Default)]
struct Busy {
    now: usize,
    most: usize,
}

/// The pages behind a lock, with a bell that rings at every change.
#[derive(Clone, Default)]
struct Book {
    pages: Arc<Mutex<Pages>>,
    changed: Arc<watch::Sender<u64>>,
}

impl Book {
    fn read<T>(&self, look: impl FnOnce(&Pages) -> T) -> T {
        look(
            &self
                .pages
                .lock()
                .expect("no story fails with the book open"),
        )
    }

    fn write<T>(&self, change: impl FnOnce(&mut Pages) -> T) -> T {
        let result = change(
            &mut self
                .pages
                .lock()
                .expect("no story fails with the book open"),
        );
        self.changed.send_modify(|version| *version += 1);
        result
    }

    /// Enters a request of a batch, which is not being answered at once.
    fn enter_batch(&self, wire: Wire, headers: HeaderMap, body: &[u8]) -> (Arc<Seen>, Answer) {
        let (seen, answer) = self.enter(wire, headers, body);
        self.write(|pages| {
            pages.busy.entry(seen.model().to_owned()).or_default().now -= 1;
        });
        (seen, answer)
    }

    /// Enters a request and finds its answer.
    fn enter(&self, wire: Wire, headers: HeaderMap, body: &[u8]) -> (Arc<Seen>, Answer) {
        let (seen, answer, rule) = self.write(|pages| {
            let seen = Arc::new(Seen {
                number: pages.seen.len(),
                wire,
                headers,
                body: serde_json::from_slice(body).unwrap_or_default(),
            });
            pages.seen.push(seen.clone());
            let busy = pages.busy.entry(seen.model().to_owned()).or_default();
            busy.now += 1;
            busy.most = busy.most.max(busy.now);
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

/// One answer under way. Dropped before its end, the other side has hung up.
struct UnderWay {
    book: Book,
    model: String,
    usage: Option<Tokens>,
    over: bool,
}

impl UnderWay {
    /// The last piece goes out now. Counted before it is sent, so that nobody who has the answer finds it missing.
    fn end(&mut self, complete: bool) {
        self.over = true;
        let usage = self.usage.filter(|_| complete);
        self.book.write(|pages| {
            pages.busy.entry(self.model.clone()).or_default().now -= 1;
            if let Some(tokens) = usage {
                pages.ledger.replies += 1;
                pages.ledger.input += tokens.whole_input();
                pages.ledger.output += tokens.output;
            }
        });
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        if !self.over {
            self.end(false);
            self.book.write(|pages| pages.hung_up += 1);
        }
    }
}

async fn anthropic(State(book): State<Book>, headers: HeaderMap, body: Bytes) -> Response {
    answer(book, Wire::Anthropic, headers, &body).await
}

async fn openai(State(book): State<Book>, headers: HeaderMap, body: Bytes) -> Response {
    answer(book, Wire::Openai, headers, &body).await
}

async fn responses(State(book): State<Book>, headers: HeaderMap, body: Bytes) -> Response {
    answer(book, Wire::Responses, headers, &body).await
}

async fn ollama(State(book): State<Book>, headers: HeaderMap, body: Bytes) -> Response {
    answer(book, Wire::Ollama, headers, &body).await
}

async fn answer(book: Book, wire: Wire, headers: HeaderMap, body: &[u8]) -> Response {
    let (seen, answer) = book.enter(wire, headers, body);
    let is_reply = matches!(answer.content, Content::Reply { .. });
    let mut under_way = UnderWay {
        book,
        model: seen.model().to_owned(),
        usage: answer.usage.filter(|_| is_reply),
        over: false,
    };
    if let Some(gate) = &answer.before {
        gate.passed().await;
    }
    let written = wires::write(&seen, &answer);
    if wire == Wire::Responses && is_reply {
        keep(&seen, &written);
    }
    let Written {
        status,
        kind,
        pieces,
        first,
        filler,
    } = written;
    let body = if answer.ending == Ending::Whole && answer.middle.is_none() && !seen.streams() {
        under_way.end(true);
        Body::from(pieces.concat())
    } else {
        Body::from_stream(stream::unfold(
            Playing {
                steps: steps(pieces, first, filler, &answer),
                under_way,
            },
            Playing::next,
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

fn steps(pieces: Vec<Bytes>, first: usize, filler: Bytes, answer: &Answer) -> VecDeque<Step> {
    let mut pieces = pieces.into_iter();
    let mut steps: VecDeque<_> = pieces.by_ref().take(first).map(Step::Send).collect();
    steps.extend(answer.middle.clone().map(Step::Wait));
    match answer.ending {
        Ending::Whole => steps.extend(pieces.map(Step::Send)),
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
struct Playing {
    steps: VecDeque<Step>,
    under_way: UnderWay,
}

impl Playing {
    async fn next(mut self) -> Option<(io::Result<Bytes>, Self)> {
        loop {
            // The server writes out what it has when a body makes it wait: each piece goes its own way, before a break too.
            tokio::task::yield_now().await;
            match self.steps.pop_front()? {
                Step::Send(piece) => {
                    if self.steps.is_empty() {
                        self.under_way.end(true);
                    }
                    return Some((Ok(piece), self));
                }
                Step::SendForEver(piece) => {
                    self.steps.push_front(Step::SendForEver(piece.clone()));
                    return Some((Ok(piece), self));
                }
                Step::Wait(gate) => gate.passed().await,
                Step::Break => {
                    self.under_way.end(false);
                    return Some((Err(io::ErrorKind::ConnectionReset.into()), self));
                }
            }
        }
    }
}

/// Writes a reply of this provider's own down for `tests/validate_wire.sh`, which sets `AXED_KEEP_REPLIES`.
fn keep(seen: &Seen, written: &Written) {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let Some(folder) = axed::config::load::environment().remove("AXED_KEEP_REPLIES") else {
        return;
    };
    let ending = match seen.streams() {
        true => "sse",
        false => "json",
    };
    let count = COUNT.fetch_add(1, Ordering::SeqCst);
    let file = Path::new(&folder).join(format!("responses-{count:03}.{ending}"));
    std::fs::write(file, written.pieces.concat()).expect("a folder for replies");
}
