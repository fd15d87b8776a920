//! Schedules: runs that the daemon starts at times.

mod agent_files;
mod keys;
mod times;

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use crate::support::app::TestApp;

/// A schedule for the UTC minute that is this long ago, with further keys.
pub fn schedule_at(ago: SignedDuration, more: &str) -> String {
    let time = Timestamp::now() - ago;
    let cron = time.strftime("%M %H * * *");
    format!("[[schedules]]\nname = \"daily\"\ncron = \"{cron}\"\ninput = \"go\"\n{more}\n")
}

/// The only schedule, as the list shows it.
pub async fn only_schedule(app: &TestApp) -> Value {
    let list = app.get("/schedules").await;
    assert_eq!(list.status, 200, "{}", list.text);
    let list = list.json();
    assert_eq!(list["data"].as_array().expect("a list").len(), 1, "{list}");
    list["data"][0].clone()
}

/// Waits until the scheduler knows the schedules.
pub async fn wait_until_seen(app: &TestApp) {
    let db = app.database();
    crate::support::eventually("a schedule in the store", async || {
        (db.count("schedules") > 0).then_some(())
    })
    .await;
}

/// Has the schedules look as if the daemon had not run for this long. Only while no daemon runs.
pub fn move_back(app: &TestApp, ago: SignedDuration) {
    let db = app.database();
    assert!(db.count("schedules") > 0, "no schedule was seen");
    let at = (Timestamp::now() - ago).as_second();
    db.execute(&format!(
        "UPDATE schedules SET handled_at = {at}, last_at = NULL, last_run = NULL, last_eval = NULL"
    ));
}

/// The ids of all root runs, newest first.
pub async fn run_ids(app: &TestApp) -> Vec<String> {
    let page = app.get("/runs").await.json();
    let runs = page["data"].as_array().expect("runs").iter();
    runs.map(|run| run["id"].as_str().expect("an id").to_owned())
        .collect()
}
