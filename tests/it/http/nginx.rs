//! Behind a real nginx with its default proxy settings. Skipped, with a note on stderr, if there is none:
//! `tests/install_tools.sh` installs it.

use std::fs;
use std::io::ErrorKind;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;

use reqwest::Client;
use serde_json::json;
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

use crate::support::app::{TestApp, send};
use crate::support::events::{Event, Events};
use crate::support::gate::Gate;
use crate::support::provider::answer::says;
use crate::support::{eventually, within_timeout};

/// Debian keeps it out of the path of users without rights.
const PLACES: [&str; 2] = ["nginx", "/usr/sbin/nginx"];

/// An nginx of one's own. Ends with the story.
struct Nginx {
    url: String,
    _child: Child,
    _home: TempDir,
}

impl Nginx {
    /// An nginx in front of this daemon; `None` if nginx is not installed.
    async fn before(app: &TestApp) -> Option<Self> {
        loop {
            let home = tempfile::tempdir().expect("a temporary directory");
            // Its worker may be another user.
            fs::set_permissions(home.path(), fs::Permissions::from_mode(0o755)).expect("a mode");
            let free = TcpListener::bind("127.0.0.1:0").expect("a free port");
            let address = free.local_addr().expect("an address");
            drop(free);
            let config = format!(
                "daemon off;\nmaster_process off;\npid nginx.pid;\nerror_log stderr;\nevents {{}}\nhttp {{\n\
                 access_log off;\nclient_body_temp_path body;\nproxy_temp_path proxy;\nfastcgi_temp_path fastcgi;\n\
                 uwsgi_temp_path uwsgi;\nscgi_temp_path scgi;\n\
                 server {{ listen {address}; location / {{ proxy_pass {}; }} }}\n}}\n",
                app.daemon.url
            );
            fs::write(home.path().join("nginx.conf"), config).expect("write a file");
            let start = |program: &str| {
                Command::new(program)
                    .args(["-e", "stderr", "-c", "nginx.conf", "-p"])
                    .arg(home.path())
                    .stdin(Stdio::null())
                    .kill_on_drop(true)
                    .spawn()
            };
            let started = PLACES.iter().map(|program| start(program)).find(
                |started| !matches!(started, Err(error) if error.kind() == ErrorKind::NotFound),
            );
            let Some(started) = started else {
                eprintln!("skipped: nginx is not installed; tests/install_tools.sh installs it");
                return None;
            };
            let mut child = started.expect("start nginx");
            let listens = eventually("nginx to listen", async || {
                match child.try_wait().expect("look at nginx") {
                    Some(status) => Some(Err(status)),
                    None => TcpStream::connect(address).await.ok().map(|_| Ok(())),
                }
            })
            .await;
            match listens {
                Ok(()) => {
                    return Some(Self {
                        url: format!("http://{address}"),
                        _child: child,
                        _home: home,
                    });
                }
                // Another process may have taken the port; any other error is on stderr.
                Err(_) if TcpStream::connect(address).await.is_ok() => {}
                Err(status) => panic!("nginx ended with {status}"),
            }
        }
    }
}

#[tokio::test]
async fn nginx_with_default_settings_does_not_buffer_events() {
    let app = TestApp::setup()
        .prefix("/axed")
        .agent("solo", "")
        .spawn()
        .await;
    let Some(nginx) = Nginx::before(&app).await else {
        return;
    };
    let gate = Gate::closed();
    let words = "one two three four five six seven";
    app.provider.will("solo", [says(words).pausing_at(&gate)]);
    let client = Client::new();

    // The request that starts the run is a stream too, and the run is held until both have sent their first events.
    let request = client
        .post(format!("{}/axed/agents/solo/runs", nginx.url))
        .header("accept", "text/event-stream")
        .json(&json!({"input": "go"}));
    let response = within_timeout("a head", request.send())
        .await
        .expect("a head");
    let location = response.headers()["location"]
        .to_str()
        .expect("text")
        .to_owned();
    assert!(location.starts_with("/axed/runs/run_"), "{location}");
    let mut posted = Events::new(response);
    let mut reported = posted.until("turn.started").await;
    app.provider.wait_for_concurrency("solo", 1).await;
    let events = client
        .get(format!("{}{location}/events", nginx.url))
        .header("accept", "text/event-stream");
    let mut followed = Events::new(
        within_timeout("a head", events.send())
            .await
            .expect("a head"),
    );
    let mut received = followed.until("turn.started").await;
    gate.open();
    reported.extend(posted.rest().await);
    received.extend(followed.rest().await);

    let numbered = |events: Vec<Event>| -> Vec<Event> {
        let numbered = events.into_iter().filter(|event| event.seq() > 0);
        numbered.collect()
    };
    let text = |events: &[Event]| -> String {
        let deltas = events.iter().filter_map(|event| event["text"].as_str());
        deltas.collect()
    };
    assert_eq!(text(&reported), words);
    assert_eq!(numbered(reported), numbered(received));
    let run = send(client.get(format!("{}{location}?wait=180", nginx.url))).await;
    assert_eq!((run.status, &run.json()["content"]), (200, &json!(words)));
    let last = run.json()["last_event"].to_string();
    let over = client
        .get(format!("{}{location}/events", nginx.url))
        .header("accept", "text/event-stream")
        .header("last-event-id", last);
    assert_eq!(send(over).await.status, 204);
}

#[tokio::test]
async fn a_path_prefix_works_behind_nginx() {
    let app = TestApp::setup()
        .prefix("/axed")
        .agent("solo", "")
        .spawn()
        .await;
    let Some(nginx) = Nginx::before(&app).await else {
        return;
    };
    app.provider.will("solo", [says("done")]);
    let client = Client::new();
    let get = |path: &str| send(client.get(format!("{}{path}", nginx.url)));

    assert_eq!(get("/axed/readyz").await.status, 200);
    get("/agents").await.problem(404);
    let started = client
        .post(format!("{}/axed/agents/solo/runs?wait=180", nginx.url))
        .json(&json!({"input": "go"}));
    let run = send(started).await;
    assert_eq!(run.status, 200, "{}", run.text);
    assert_eq!(get(run.location()).await.json(), run.json());
    for (link, path) in run.json()["links"].as_object().expect("links") {
        let path = path.as_str().expect("a path");
        assert!(path.starts_with(run.location()), "{link}: {path}");
        if link != "cancel" {
            assert_eq!(get(path).await.status, 200, "{path}");
        }
    }
}
