//! A TCP proxy with an address that stays, as a proxy or a service in front of daemons has.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::io::{self, AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::support::within_timeout;

/// The proxy. Goes away with the story.
pub struct Relay {
    /// `http://<addr>`.
    pub url: String,
    state: Arc<State>,
    _server: JoinSet<()>,
}

struct State {
    /// The address of the daemon that new connections go to.
    target: watch::Sender<String>,
    /// What clients have got.
    sent: watch::Sender<String>,
    /// The next connection in which a client gets this breaks off.
    breaks_after: Mutex<Option<String>>,
}

impl Relay {
    /// Starts one on a free port, to the daemon with this URL.
    pub async fn start(daemon: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("an address");
        let state = Arc::new(State {
            target: watch::Sender::new(address(daemon)),
            sent: watch::Sender::default(),
            breaks_after: Mutex::default(),
        });
        let mut server = JoinSet::new();
        let shared = Arc::clone(&state);
        server.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let state = Arc::clone(&shared);
                // A daemon that is away is a connection that ends at once.
                connections.spawn(async move { drop(relay(client, &state).await) });
            }
        });
        Self {
            url: format!("http://{addr}"),
            state,
            _server: server,
        }
    }

    /// New connections go to the daemon with this URL.
    pub fn set_daemon(&self, url: &str) {
        self.state.target.send_replace(address(url));
    }

    /// Breaks off one connection once its client has got `text`.
    pub fn break_after(&self, text: &str) {
        *self.state.lock_break() = Some(text.to_owned());
    }

    /// Waits until clients have got `text`.
    pub async fn wait_for(&self, text: &str) {
        let mut sent = self.state.sent.subscribe();
        let found = within_timeout(text, sent.wait_for(|sent| sent.contains(text))).await;
        drop(found.expect("it lives"));
    }
}

impl State {
    fn lock_break(&self) -> MutexGuard<'_, Option<String>> {
        self.breaks_after
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the connection whose client has just got `text` breaks off.
    fn breaks_off(&self, text: &str) -> bool {
        let mut breaks_after = self.lock_break();
        let found = breaks_after.take_if(|searched| text.contains(searched.as_str()));
        found.is_some()
    }
}

fn address(url: &str) -> String {
    url.trim_start_matches("http://").to_owned()
}

async fn relay(client: TcpStream, state: &State) -> io::Result<()> {
    let target = state.target.borrow().clone();
    let daemon = TcpStream::connect(target).await?;
    let (mut requests, mut to_client) = client.into_split();
    let (mut responses, mut to_daemon) = daemon.into_split();
    let pass_responses = async {
        let mut buffer = [0; 4096];
        loop {
            let count = responses.read(&mut buffer).await?;
            if count == 0 {
                return io::Result::Ok(());
            }
            to_client.write_all(&buffer[..count]).await?;
            let text = String::from_utf8_lossy(&buffer[..count]);
            state.sent.send_modify(|sent| sent.push_str(&text));
            if state.breaks_off(&text) {
                return Ok(());
            }
        }
    };
    tokio::select! {
        passed = pass_responses => passed,
        passed = io::copy(&mut requests, &mut to_daemon) => passed.map(drop),
    }
}
