//! A service that sends given bytes over a real socket, and keeps the requests. It has no idea
//! of any wire: what it sends was recorded from a real server, or is hostile.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};

use crate::support::TEST_TIMEOUT;

/// What is sent for one request.
#[derive(Clone, Debug)]
pub struct CannedResponse {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    send_mode: SendMode,
}

#[derive(Clone, Copy, Debug)]
enum SendMode {
    /// With its length.
    Whole,
    /// In chunks of this many bytes.
    Chunks(usize),
    /// So many bytes in chunks of one, then the connection is closed.
    Cut(usize),
    /// The body again and again.
    Endless,
    /// The head, then nothing.
    Stalled,
    /// Not even a head.
    Silent,
}

impl CannedResponse {
    /// A body with a status and a content type.
    pub fn new(status: u16, kind: &str, body: impl Into<Vec<u8>>) -> Self {
        Self {
            status,
            headers: vec![("content-type".to_owned(), kind.to_owned())],
            body: body.into(),
            send_mode: SendMode::Whole,
        }
    }

    /// A JSON document.
    pub fn json(status: u16, body: &str) -> Self {
        Self::new(status, "application/json", body)
    }

    /// What a real server sent: `tests/recordings/<folder>/<case>.response.*`.
    pub fn recorded(folder: &str, case: &str) -> Self {
        let path = |ending: &str| {
            Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("tests/recordings")
                .join(folder)
                .join(format!("{case}.response.{ending}"))
        };
        let body = ["json", "sse", "ndjson"]
            .iter()
            .find_map(|ending| std::fs::read(path(ending)).ok())
            .expect("a recorded body");
        let heads = std::fs::read_to_string(path("http")).expect("recorded heads");
        // The request's head comes first.
        let head = heads.replace("\r\n", "\n");
        let head = head
            .split("\n\n")
            .nth(1)
            .expect("a reply's head")
            .to_owned();
        let status = head.split(' ').nth(1).expect("a status").parse();
        let kind = head
            .lines()
            .find_map(|line| line.strip_prefix("Content-Type: "));
        Self::new(status.expect("a number"), kind.expect("a type"), body)
    }

    /// Whether this is a stream.
    pub fn is_stream(&self) -> bool {
        let kind = &self.headers[0].1;
        kind.starts_with("text/event-stream") || kind.starts_with("application/x-ndjson")
    }

    /// How many bytes the body has.
    pub fn len(&self) -> usize {
        self.body.len()
    }

    /// Sends this header too.
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Sends chunks of this many bytes.
    pub fn in_chunks(mut self, size: usize) -> Self {
        self.send_mode = SendMode::Chunks(size);
        self
    }

    /// Closes the connection after this many bytes of the body.
    pub fn cut_after(mut self, size: usize) -> Self {
        self.send_mode = SendMode::Cut(size);
        self
    }

    /// Repeats the body for ever.
    pub fn endless(mut self) -> Self {
        self.send_mode = SendMode::Endless;
        self
    }

    /// Sends the head and then nothing more.
    pub fn stalled(mut self) -> Self {
        self.send_mode = SendMode::Stalled;
        self
    }

    /// Sends nothing at all.
    pub fn silent() -> Self {
        Self {
            send_mode: SendMode::Silent,
            ..Self::new(200, "text/plain", "")
        }
    }
}

/// One request as it came.
#[derive(Clone, Debug)]
pub struct ReceivedRequest {
    /// The path.
    pub path: String,
    /// The headers, their names in lower case.
    pub headers: BTreeMap<String, String>,
    /// The body.
    pub body: String,
}

/// What a service has lived through.
#[derive(Default)]
struct History {
    requests: Vec<ReceivedRequest>,
    connections: usize,
    ended: usize,
}

/// Its life so far, and news of it.
#[derive(Default)]
struct SharedHistory {
    history: Mutex<History>,
    changed: Condvar,
}

impl SharedHistory {
    fn update<T>(&self, change: impl FnOnce(&mut History) -> T) -> T {
        let result = change(&mut self.history.lock().expect("no panic"));
        self.changed.notify_all();
        result
    }
}

/// A running service.
pub struct ReplayServer {
    address: SocketAddr,
    history: Arc<SharedHistory>,
    stop: Arc<AtomicBool>,
    listener_thread: Option<JoinHandle<()>>,
}

impl ReplayServer {
    /// A service that answers its requests with `answers`, the last one over and over.
    pub fn start(answers: impl IntoIterator<Item = CannedResponse>) -> Self {
        let answers: Vec<_> = answers.into_iter().collect();
        assert!(!answers.is_empty(), "a service needs an answer");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let history = Arc::<SharedHistory>::default();
        let stop = Arc::<AtomicBool>::default();
        let listens = {
            let (diary, stop) = (history.clone(), stop.clone());
            thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    if stop.load(Ordering::SeqCst) {
                        break;
                    }
                    diary.update(|life| life.connections += 1);
                    let (answers, diary) = (answers.clone(), diary.clone());
                    // Ends when the client hangs up.
                    thread::spawn(move || serve(&stream, &answers, &diary));
                }
            })
        };
        Self {
            address,
            history,
            stop,
            listener_thread: Some(listens),
        }
    }

    /// Where it is.
    pub fn base_url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// All requests so far.
    pub fn requests(&self) -> Vec<ReceivedRequest> {
        self.history.update(|life| life.requests.clone())
    }

    /// How many connections were made.
    pub fn connections(&self) -> usize {
        self.history.update(|life| life.connections)
    }

    /// Waits for a request.
    pub async fn wait_for_request(&self) {
        self.wait_until(|life| !life.requests.is_empty()).await;
    }

    /// Waits until a client has hung up.
    pub async fn wait_for_disconnect(&self) {
        self.wait_until(|life| life.ended > 0).await;
    }

    async fn wait_until(&self, condition: fn(&History) -> bool) {
        let diary = self.history.clone();
        let waits = move || {
            let history = diary.history.lock().expect("no panic");
            let waited = diary
                .changed
                .wait_timeout_while(history, TEST_TIMEOUT, |life| !condition(life));
            assert!(
                !waited.expect("no panic").1.timed_out(),
                "it never happened"
            );
        };
        tokio::task::spawn_blocking(waits)
            .await
            .expect("it happens");
    }
}

impl Drop for ReplayServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        // Wakes the listener, so that it sees the stop.
        let _ = TcpStream::connect(self.address);
        if let Some(listens) = self.listener_thread.take() {
            let _ = listens.join();
        }
    }
}

fn serve(stream: &TcpStream, answers: &[CannedResponse], diary: &SharedHistory) {
    let _ = stream.set_nodelay(true);
    let mut reader = BufReader::new(stream);
    while let Some(request) = read_request(&mut reader) {
        save_body(&request);
        let turn = diary.update(|life| {
            life.requests.push(request);
            life.requests.len() - 1
        });
        let answer = answers.get(turn).or(answers.last()).expect("an answer");
        if !matches!(send(stream, answer), Ok(true)) {
            break;
        }
    }
    let _ = stream.shutdown(Shutdown::Both);
    diary.update(|life| life.ended += 1);
}

fn read_request(reader: &mut impl BufRead) -> Option<ReceivedRequest> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        match line.trim_end() {
            "" => break,
            line => lines.push(line.to_owned()),
        }
    }
    let path = lines.first()?.split(' ').nth(1)?.to_owned();
    let headers: BTreeMap<_, _> = lines[1..]
        .iter()
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
        .collect();
    let length = headers
        .get("content-length")
        .map_or(Ok(0), |n| n.parse())
        .ok()?;
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some(ReceivedRequest {
        path,
        headers,
        body: String::from_utf8(body).ok()?,
    })
}

/// Sends the answer; returns whether the connection can serve another request.
fn send(mut stream: &TcpStream, answer: &CannedResponse) -> std::io::Result<bool> {
    if matches!(answer.send_mode, SendMode::Silent) {
        return wait_for_eof(stream);
    }
    let mut head = format!("HTTP/1.1 {} Recorded\r\n", answer.status);
    for (name, value) in &answer.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    let body = &answer.body;
    match answer.send_mode {
        SendMode::Whole => head.push_str(&format!("content-length: {}\r\n\r\n", body.len())),
        _ => head.push_str("transfer-encoding: chunked\r\n\r\n"),
    }
    stream.write_all(head.as_bytes())?;
    let chunk = |data: &[u8]| {
        let mut framed = format!("{:x}\r\n", data.len()).into_bytes();
        framed.extend_from_slice(data);
        framed.extend_from_slice(b"\r\n");
        framed
    };
    match answer.send_mode {
        SendMode::Whole => stream.write_all(body)?,
        SendMode::Chunks(size) => {
            let mut chunks = body.chunks(size);
            let last = chunks.next_back().unwrap_or_default();
            for data in chunks {
                stream.write_all(&chunk(data))?;
            }
            // In one piece: a client does not wait for long for the end of a body once it has the last message.
            stream.write_all(&[&chunk(last)[..], b"0\r\n\r\n"].concat())?;
        }
        SendMode::Cut(size) => {
            stream.write_all(&chunk(&body[..size]))?;
            return Ok(false);
        }
        SendMode::Endless => loop {
            stream.write_all(&chunk(body))?;
        },
        SendMode::Stalled | SendMode::Silent => return wait_for_eof(stream),
    }
    Ok(true)
}

fn wait_for_eof(mut stream: &TcpStream) -> std::io::Result<bool> {
    let _ = stream.read(&mut [0])?;
    Ok(false)
}

/// Writes the body down for `tests/validate_wire.sh`, which sets `AXED_KEEP_BODIES`.
fn save_body(request: &ReceivedRequest) {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let Some(folder) = axed::config::environment::process_environment().remove("AXED_KEEP_BODIES")
    else {
        return;
    };
    let wire = match request.path.as_str() {
        path if path.ends_with("/v1/messages") => "anthropic",
        path if path.ends_with("/chat/completions") => "openai",
        path if path.ends_with("/responses") => "responses",
        path if path.ends_with("/api/chat") => "ollama",
        path => panic!("no wire has the path {path}"),
    };
    let count = COUNT.fetch_add(1, Ordering::SeqCst);
    let file = Path::new(&folder).join(format!("{wire}-{count:03}.json"));
    std::fs::write(file, &request.body).expect("a folder for bodies");
}
