//! The runtime of all commands, and how the system schedules its threads.

use std::io;

use tokio::runtime::{Builder, Runtime};

pub fn build() -> io::Result<Runtime> {
    Builder::new_multi_thread()
        .enable_all()
        .on_thread_start(schedule_in_batches)
        .build()
}

/// Schedules this thread by `SCHED_BATCH`, sched(7): when it becomes ready, it does not interrupt the thread that has its core.
/// Otherwise each reply of a provider would interrupt a commit of the store on the same core, and both would lose what they had in
/// its caches: a fifth of the processor time of a short run. Changes nothing if the operator has chosen a policy or a nice value.
#[cfg(target_os = "linux")]
fn schedule_in_batches() {
    use thread_priority::unix::{
        NormalThreadSchedulePolicy, ThreadSchedulePolicy, set_thread_priority_and_policy,
        thread_native_id, thread_schedule_policy,
    };
    use thread_priority::{ThreadPriority, ThreadPriorityOsValue};

    let default = ThreadSchedulePolicy::Normal(NormalThreadSchedulePolicy::Other);
    let is_default = thread_schedule_policy() == Ok(default);
    if is_default && rustix::process::getpriority_process(None) == Ok(0) {
        let nice = ThreadPriority::Os(ThreadPriorityOsValue::default());
        let policy = ThreadSchedulePolicy::Normal(NormalThreadSchedulePolicy::Batch);
        // What the system refuses only makes it slower.
        let _ = set_thread_priority_and_policy(thread_native_id(), nice, policy);
    }
}

#[cfg(not(target_os = "linux"))]
fn schedule_in_batches() {}
