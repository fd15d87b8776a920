//! TLS to the database, by `sslmode` and `sslrootcert`.

use std::process::{Output, Stdio};

use crate::cluster::{other, spawn};
use crate::support::app::TestApp;
use crate::support::daemon::Daemon;
use crate::support::postgres;
use crate::support::provider::answer::says;
use crate::support::{eventually, within_timeout};

/// The connections to the database that have TLS, and those that have none, except this one.
fn connections(url: &str) -> (i64, i64) {
    postgres::with_client(url, async |client| {
        let count = "SELECT count(*) FILTER (WHERE s.ssl), count(*) FILTER (WHERE NOT s.ssl) \
             FROM pg_stat_ssl s JOIN pg_stat_activity a USING (pid) \
             WHERE a.datname = current_database() AND s.pid <> pg_backend_pid()";
        let row = client.query_one(count, &[]).await?;
        Ok((row.try_get(0)?, row.try_get(1)?))
    })
}

/// What a daemon says that cannot start.
async fn refused(app: &TestApp, url: &str) -> String {
    let mut command = other(app, url, "refused");
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = within_timeout("an end", command.output()).await;
    let Output { status, stderr, .. } = output.expect("an exit");
    assert!(!status.success());
    String::from_utf8_lossy(&stderr).into_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_have_tls_and_the_certificate_is_checked() {
    let Some((mut app, url)) = spawn(TestApp::setup().agent("solo", "")).await else {
        return;
    };
    let tls = |host: &str, mode: &str| postgres::tls_url(&url, host, mode);
    let Some(checked) = tls("localhost", "verify-full") else {
        return eprintln!("skipped: AXED_TEST_POSTGRES_TLS names no server");
    };
    app.daemon.kill().await;
    let working = [
        checked,
        tls("127.0.0.1", "verify-ca").expect("a URL"),
        tls("127.0.0.1", "require").expect("a URL"),
    ];
    for safe_url in &working {
        app.daemon = Daemon::start(other(&app, safe_url, "story")).await;
        app.provider.will("solo", [says("safe")]);
        assert_eq!(app.run("solo", "x").await.output(), "safe");
        // Some are opened in the background, and the database sees late that the killed daemon has gone.
        eventually(&format!("TLS only with {safe_url}"), async || {
            let (safe, open) = connections(&url);
            (safe >= 4 && open == 0).then_some(())
        })
        .await;
        app.daemon.kill().await;
    }
    // The certificate is that of another host, and of an authority that the system does not know.
    let other_host = tls("127.0.0.1", "verify-full").expect("a URL");
    let (unknown, _) = working[0].split_once("&sslrootcert").expect("a root");
    for unsafe_url in [&other_host, unknown] {
        let said = refused(&app, unsafe_url).await;
        assert!(said.contains("certificate"), "{unsafe_url}: {said}");
        assert!(said.contains("in sslrootcert"), "{unsafe_url}: {said}");
    }
}
