//! A service manager such as systemd, as the daemon's parent: a datagram socket that gets its states.

use tokio::net::UnixDatagram;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::task::JoinSet;

use crate::support::app::TestApp;
use crate::support::gate::Gate;
use crate::support::provider::answer::says;
use crate::support::within_timeout;
use crate::tools::run_command::{is_confined, reported, worker};

type Notifications = UnboundedReceiver<String>;

/// What arrives at the socket, as long as the task works. It is always read, because a sender waits for space.
fn received(socket: UnixDatagram) -> (Notifications, JoinSet<()>) {
    let (sender, notifications) = unbounded_channel();
    let mut reader = JoinSet::new();
    reader.spawn(async move {
        let mut buffer = [0; 4096];
        while let Ok(length) = socket.recv(&mut buffer).await {
            let _ = sender.send(String::from_utf8_lossy(&buffer[..length]).into_owned());
        }
    });
    (notifications, reader)
}

/// The next notification that contains this line.
async fn notification(notifications: &mut Notifications, line: &str) -> String {
    within_timeout(line, async {
        loop {
            let text = notifications.recv().await.expect("a datagram");
            if text.lines().any(|one| one == line) {
                return text;
            }
        }
    })
    .await
}

#[tokio::test]
async fn a_service_manager_is_notified_of_every_state() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("notify");
    let (mut socket, _reader) = received(UnixDatagram::bind(&path).expect("a socket"));
    let mut app = worker("")
        .environment("NOTIFY_SOCKET", &path.display().to_string())
        .environment("WATCHDOG_USEC", "200000")
        .agent("slow", "")
        .spawn()
        .await;
    let ready = notification(&mut socket, "READY=1").await;
    let status = format!("STATUS=Listening on {}", app.daemon.url);
    assert!(ready.lines().any(|line| line == status), "{ready}");
    notification(&mut socket, "WATCHDOG=1").await;

    app.daemon.signal("HUP");
    let reloading = notification(&mut socket, "RELOADING=1").await;
    assert!(reloading.contains("\nMONOTONIC_USEC="), "{reloading}");
    notification(&mut socket, "READY=1").await;

    if is_confined(&app) {
        let env = reported(&app, &["env"]).await.remove(0);
        assert!(!env.contains("NOTIFY_SOCKET"), "{env}");
        assert!(!env.contains("WATCHDOG"), "{env}");
    }

    let gate = Gate::closed();
    app.provider.will("slow", [says("done").after_gate(&gate)]);
    app.start("slow", "go").await;
    app.provider.wait_for_request("slow", 1).await;
    app.daemon.signal("TERM");
    notification(&mut socket, "STOPPING=1").await;
    // A daemon that waits for runs is not stuck.
    notification(&mut socket, "WATCHDOG=1").await;
    gate.open();
    assert!(app.daemon.wait_for_exit().await.success());
}

#[tokio::test]
async fn a_missing_service_manager_stops_nothing() {
    let mut app = TestApp::setup()
        .environment("NOTIFY_SOCKET", "/nowhere/notify")
        .spawn()
        .await;
    app.daemon
        .wait_for_log("The service manager cannot be notified through NOTIFY_SOCKET")
        .await;
    assert_eq!(app.get("/livez").await.status, 200);
    app.daemon.signal("TERM");
    assert!(app.daemon.wait_for_exit().await.success());
}
