//! Databases of other versions.

use axed::store::postgres::error::DatabaseName;
use axed::store::postgres::schema::{MIGRATIONS, migrate};
use tokio::task::JoinSet;
use tokio_postgres::{Config, NoTls};

use crate::store::fixtures::beside;
use crate::store::fixtures::postgres as opened_postgres;

/// A migration that does not exist yet.
const NEXT: &str =
    "ALTER TABLE checks ADD COLUMN node text; INSERT INTO checks (id, at, node) VALUES (7, 7, 'a')";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_postgresql_database_of_the_version_before_is_migrated_once() {
    let Some(opened) = opened_postgres() else {
        return;
    };
    opened.store.close().await;
    let url = &opened.postgres.as_ref().expect("PostgreSQL").url;
    let config: Config = url.parse().expect("a URL");
    let name = DatabaseName::new(&config);
    let (mut client, connection) = config.connect(NoTls).await.expect("a connection");
    let mut connections = JoinSet::new();
    connections.spawn(connection);
    let next = [MIGRATIONS, &[NEXT]].concat();
    for _ in 0..2 {
        migrate(&mut client, &name, &next).await.expect("migrated");
        let sql = "SELECT 1 FROM checks WHERE node = 'a'";
        assert_eq!(client.query(sql, &[]).await.expect("rows").len(), 1);
    }
    // A node of the version before can still work beside it, until a version says that it cannot.
    beside(&opened).close().await;
    client
        .batch_execute("UPDATE axed_version SET oldest_reader = 2")
        .await
        .expect("updated");
    let error = migrate(&mut client, &name, MIGRATIONS).await;
    let text = error.expect_err("a newer database").to_string();
    let wanted = "newer version of axed (its tables are version 2, this one knows 1)";
    assert!(text.contains(wanted), "{text}");
    client
        .batch_execute("ALTER TABLE axed_version RENAME TO axed_schema")
        .await
        .expect("renamed");
    let error = migrate(&mut client, &name, MIGRATIONS).await;
    let text = error.expect_err("an unknown database").to_string();
    assert!(text.contains("development version of axed"), "{text}");
}
