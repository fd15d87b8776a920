//! Clients that take as little of the machine as they can: one keep-alive connection each, one prebuilt request.

use std::io;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// What clients got in a time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Load {
    /// Good answers a second.
    pub rate: f64,
    /// Half of the answers came within this.
    pub median: Duration,
    /// All but one of a hundred came within this.
    pub p99: Duration,
    /// Bad answers.
    pub errors: usize,
    /// Answers in all, those of the warm-up too.
    pub responses: usize,
    /// Processor time of the server for each response; zero if not measured.
    pub cpu: Duration,
}

/// What a crowd got.
#[derive(Clone, Copy, Debug)]
pub struct Crowd {
    /// From the first request to the last answer.
    pub wall: Duration,
    /// Bad answers.
    pub errors: usize,
}

/// A POST of JSON; clients connect to its `host`.
pub fn request(address: &str, path: &str, body: &str) -> Vec<u8> {
    format!(
        "POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// Lets this many clients ask one request after another for `time`.
pub async fn measure_throughput(request: &[u8], clients: usize, time: Duration) -> Load {
    let warm_up = time / 5;
    let begin = Instant::now() + warm_up;
    let end = begin + time;
    let client_loops = (0..clients).map(|_| async {
        let mut client = Client::connect(address_of(request)).await;
        let mut times = Vec::new();
        let (mut errors, mut responses) = (0, 0);
        loop {
            let sent_at = Instant::now();
            if sent_at >= end {
                return (times, errors, responses);
            }
            let is_ok = client.send(request).await;
            responses += 1;
            let now = Instant::now();
            if (begin..end).contains(&now) {
                match is_ok {
                    true => times.push(now - sent_at),
                    false => errors += 1,
                }
            }
        }
    });
    let mut times = Vec::new();
    let (mut errors, mut responses) = (0, 0);
    for (client_times, client_errors, client_responses) in join_all(client_loops).await {
        times.extend(client_times);
        errors += client_errors;
        responses += client_responses;
    }
    times.sort();
    let quantile = |part: f64| {
        let at = (times.len() as f64 * part) as usize;
        times.get(at).copied().unwrap_or_default()
    };
    Load {
        rate: times.len() as f64 / time.as_secs_f64(),
        median: quantile(0.5),
        p99: quantile(0.99),
        errors,
        responses,
        cpu: Duration::ZERO,
    }
}

/// Lets a crowd ask at the same moment, once everybody is connected.
pub async fn burst(request: &[u8], crowd: usize) -> Crowd {
    let mut clients = Vec::with_capacity(crowd);
    while clients.len() < crowd {
        // No more at a time than a listener's backlog takes.
        let batch = (crowd - clients.len()).min(100);
        clients.extend(join_all((0..batch).map(|_| Client::connect(address_of(request)))).await);
    }
    let begin = Instant::now();
    let requests = clients.iter_mut().map(|client| client.send(request));
    let results = join_all(requests).await;
    Crowd {
        wall: begin.elapsed(),
        errors: results.iter().filter(|good| !**good).count(),
    }
}

/// Sends `count` requests over this many clients, and returns how many were accepted.
pub async fn send_all(request: &[u8], clients: usize, count: usize) -> usize {
    let client_loops = (0..clients).map(|number| async move {
        let mut client = Client::connect(address_of(request)).await;
        let mut accepted = 0;
        for _ in (number..count).step_by(clients) {
            accepted += usize::from(client.send(request).await);
        }
        accepted
    });
    join_all(client_loops).await.into_iter().sum()
}

/// Waits until no run has one of these statuses.
pub async fn wait_until_none(address: &str, statuses: &[&str]) {
    let mut client = Client::connect(address).await;
    for status in statuses {
        let http_request = get_request(address, &format!("/runs?limit=1&status={status}"));
        while !client.response_contains(&http_request, "\"data\":[]").await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// How many runs have this status, 200 at most.
pub async fn count(address: &str, status: &str) -> usize {
    let body = get(address, &format!("/runs?limit=200&status={status}")).await;
    let page: serde_json::Value = serde_json::from_str(&body).expect("JSON");
    page["data"].as_array().map(Vec::len).unwrap_or_default()
}

/// Waits until a GET is answered with this body.
pub async fn wait_for_body(address: &str, path: &str, body: &str) {
    let mut client = Client::connect(address).await;
    let http_request = get_request(address, path);
    while !(client.send(&http_request).await && client.body() == body) {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// The body of a good answer to a POST.
pub async fn post(address: &str, path: &str, body: &str) -> String {
    let mut client = Client::connect(address).await;
    let is_ok = client.send(&request(address, path, body)).await;
    assert!(is_ok, "POST {path} failed: {}", client.body());
    client.body()
}

/// The id of a run that is started and not waited for.
pub async fn start_run(address: &str, agent: &str) -> String {
    let body = post(
        address,
        &format!("/agents/{agent}/runs"),
        "{\"input\":\"go\"}",
    )
    .await;
    let run: serde_json::Value = serde_json::from_str(&body).expect("JSON");
    run["id"].as_str().expect("an id").to_owned()
}

/// Connections on which this request was sent and whose responses are not read.
pub async fn send_without_reading(request: &[u8], count: usize) -> Vec<TcpStream> {
    let mut streams = Vec::with_capacity(count);
    while streams.len() < count {
        // No more at a time than a listener's backlog takes.
        let batch = (count - streams.len()).min(100);
        let sends = (0..batch).map(|_| async {
            let mut stream = TcpStream::connect(address_of(request))
                .await
                .expect("connect");
            stream.write_all(request).await.expect("ask");
            stream
        });
        streams.extend(join_all(sends).await);
    }
    streams
}

/// The body of a good answer to a GET.
pub async fn get(address: &str, path: &str) -> String {
    let mut client = Client::connect(address).await;
    let is_ok = client.send(&get_request(address, path)).await;
    assert!(is_ok, "GET {path} failed");
    client.body()
}

/// A GET; clients connect to its `host`.
pub fn get_request(address: &str, path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nhost: {address}\r\n\r\n").into_bytes()
}

fn address_of(request: &[u8]) -> &str {
    let text = std::str::from_utf8(request).expect("text");
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    host.expect("a host")
}

/// One connection and the last answer's bytes.
struct Client {
    stream: TcpStream,
    response: Vec<u8>,
    body_start: usize,
}

impl Client {
    async fn connect(address: &str) -> Self {
        let stream = TcpStream::connect(address).await.expect("connect");
        let _ = stream.set_nodelay(true);
        Self {
            stream,
            response: Vec::with_capacity(2048),
            body_start: 0,
        }
    }

    /// Sends a request and returns whether the response is good: 2xx, and not of a failed run.
    async fn send(&mut self, request: &[u8]) -> bool {
        match self.exchange(request).await {
            Ok(()) => {
                self.response.starts_with(b"HTTP/1.1 2")
                    && !contains(&self.response, b"\"status\":\"failed\"")
            }
            Err(_) => {
                // The next request needs a connection that is in step again.
                *self = Self::connect(address_of(request)).await;
                false
            }
        }
    }

    async fn response_contains(&mut self, request: &[u8], part: &str) -> bool {
        self.send(request).await && contains(&self.response, part.as_bytes())
    }

    async fn exchange(&mut self, request: &[u8]) -> io::Result<()> {
        self.stream.write_all(request).await?;
        self.response.clear();
        loop {
            if self.stream.read_buf(&mut self.response).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if self.is_whole() {
                return Ok(());
            }
        }
    }

    fn is_whole(&mut self) -> bool {
        let Some(end) = self
            .response
            .windows(4)
            .position(|four| four == b"\r\n\r\n")
        else {
            return false;
        };
        self.body_start = end + 4;
        let head = std::str::from_utf8(&self.response[..end]).unwrap_or_default();
        let field = |name: &str| {
            head.lines().find_map(|line| {
                let (key, value) = line.split_once(':')?;
                key.eq_ignore_ascii_case(name).then(|| value.trim())
            })
        };
        match field("content-length").and_then(|length| length.parse::<usize>().ok()) {
            Some(length) => self.response.len() >= self.body_start + length,
            None if field("transfer-encoding").is_some() => {
                self.response.ends_with(b"\r\n0\r\n\r\n")
            }
            None => true,
        }
    }

    fn body(&self) -> String {
        String::from_utf8_lossy(&self.response[self.body_start..]).into_owned()
    }
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}
