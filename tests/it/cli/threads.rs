//! How the system schedules the threads of the daemon.

use std::fs;

use crate::support::app::TestApp;

/// `SCHED_OTHER` and `SCHED_BATCH` of sched(7).
const OTHER: &str = "0";
const BATCH: &str = "3";

/// The nice value and the policy in `/proc/…/stat`, see proc_pid_stat(5).
fn scheduling(stat: &str) -> (String, String) {
    let stat = fs::read_to_string(stat).expect("a process");
    let (_, after_name) = stat.rsplit_once(')').expect("a name");
    let fields: Vec<&str> = after_name.split_whitespace().collect();
    (fields[16].to_owned(), fields[38].to_owned())
}

#[tokio::test]
async fn threads_of_the_runtime_do_not_interrupt_a_commit() {
    let (nice, policy) = scheduling("/proc/self/stat");
    if (&*nice, &*policy) != ("0", OTHER) {
        return eprintln!("skipped: the tests are not scheduled as usual");
    }
    let app = TestApp::setup().spawn().await;
    let tasks = format!("/proc/{}/task", app.daemon.pid());
    let mut workers = 0;
    for task in fs::read_dir(&tasks).expect("threads") {
        let task = task.expect("a thread").path();
        let name = fs::read_to_string(task.join("comm")).expect("a name");
        let (_, policy) = scheduling(&task.join("stat").to_string_lossy());
        match name.trim() {
            "tokio-rt-worker" => {
                workers += 1;
                assert_eq!(policy, BATCH);
            }
            name => assert_eq!(policy, OTHER, "{name}"),
        }
    }
    assert!(workers > 0);
}
