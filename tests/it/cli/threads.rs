//! How the system schedules the threads of the daemon.

use std::collections::BTreeSet;
use std::path::Path;
use std::{fs, io};

use crate::support::app::TestApp;

/// `SCHED_OTHER` and `SCHED_BATCH` of sched(7).
const OTHER: &str = "0";
const BATCH: &str = "3";

/// The nice value and the policy of a process or thread, see proc_pid_stat(5).
fn scheduling(task: &Path) -> io::Result<(String, String)> {
    let stat = fs::read_to_string(task.join("stat"))?;
    let (_, after_name) = stat.rsplit_once(')').expect("a name");
    let fields: Vec<&str> = after_name.split_whitespace().collect();
    Ok((fields[16].to_owned(), fields[38].to_owned()))
}

#[tokio::test]
async fn threads_of_the_runtime_do_not_interrupt_a_commit() {
    let (nice, policy) = scheduling(Path::new("/proc/self")).expect("this process");
    if (&*nice, &*policy) != ("0", OTHER) {
        return eprintln!("skipped: the tests are not scheduled as usual");
    }
    let app = TestApp::setup().spawn().await;
    let tasks = format!("/proc/{}/task", app.daemon.pid());
    let (mut workers, mut writers) = (BTreeSet::new(), BTreeSet::new());
    for task in fs::read_dir(&tasks).expect("threads") {
        let task = task.expect("a thread").path();
        // A thread may have ended meanwhile.
        let (Ok(name), Ok((_, policy))) =
            (fs::read_to_string(task.join("comm")), scheduling(&task))
        else {
            continue;
        };
        match name.trim() {
            "tokio-rt-worker" => workers.insert(policy),
            "store-writer" => writers.insert(policy),
            _ => continue,
        };
    }
    // One that is just being started has the policy of the thread that started it.
    assert!(workers.contains(BATCH), "{workers:?}");
    assert!(!writers.contains(BATCH), "{writers:?}");
}
