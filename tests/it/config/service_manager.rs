//! A service manager such as systemd, as the daemon's parent: a datagram socket that gets its states.

use tokio::net::UnixDatagram;

use crate::support::app::TestApp;
use crate::support::gate::Gate;
use crate::support::provider::answer::says;
use crate::support::within_timeout;
use crate::tools::run_command::{is_confined, reported, worker};

/// The next notification that contains this line.
async fn notification(socket: &UnixDatagram, line: &str) -> String {
    within_timeout(line, async {
        loop {
            let mut buffer = [0; 4096];
            let length = socket.recv(&mut buffer).await.expect("a datagram");
            let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
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
    let socket = UnixDatagram::bind(&path).expect("a socket");
    let mut app = worker("")
        .environment("NOTIFY_SOCKET", &path.display().to_string())
        .environment("WATCHDOG_USEC", "200000")
        .agent("slow", "")
        .spawn()
        .await;
    let ready = notification(&socket, "READY=1").await;
    let status = format!("STATUS=Listening on {}", app.daemon.url);
    assert!(ready.lines().any(|line| line == status), "{ready}");
    notification(&socket, "WATCHDOG=1").await;

    app.daemon.signal("HUP");
    let reloading = notification(&socket, "RELOADING=1").await;
    assert!(reloading.contains("\nMONOTONIC_USEC="), "{reloading}");
    notification(&socket, "READY=1").await;

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
    notification(&socket, "STOPPING=1").await;
    // A daemon that waits for runs is not stuck.
    notification(&socket, "WATCHDOG=1").await;
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
