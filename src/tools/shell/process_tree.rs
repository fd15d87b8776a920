//! Finds every process that descends from this one, measures and kills them.

use std::collections::{BTreeMap, BTreeSet};

use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

/// Sends SIGKILL to all current descendants, one by one. The next call finds those that were started during this one.
pub fn kill() {
    let own_pid = own_pid();
    for (pid, parent) in descendants(own_pid, &parents()) {
        let Some(process) = Pid::from_raw(pid) else {
            continue;
        };
        // By now the pid may belong to another process. The handle stays with the process that it was opened for.
        match pidfd_open(process, PidfdFlags::empty()) {
            Ok(handle) => {
                if parent_of(pid).is_some_and(|now| now == parent || now == own_pid) {
                    let _ = pidfd_send_signal(&handle, Signal::KILL);
                }
            }
            Err(rustix::io::Errno::NOSYS) => {
                let _ = kill_process(process, Signal::KILL);
            }
            Err(_) => {}
        }
    }
}

/// The processes that descend from this one.
pub fn descendants_of_self() -> Vec<i32> {
    let descendants = descendants(own_pid(), &parents());
    descendants.into_iter().map(|(pid, _)| pid).collect()
}

/// The number of this process in `/proc`, which may show another namespace than its own; 0 without `/proc`.
fn own_pid() -> i32 {
    let link = std::fs::read_link("/proc/self");
    link.ok()
        .and_then(|pid| pid.to_str()?.parse().ok())
        .unwrap_or(0)
}

/// The number of threads; 0 if the process has ended.
pub fn threads_of(pid: i32) -> usize {
    let stat = std::fs::read(format!("/proc/{pid}/stat"));
    stat.ok()
        .and_then(|stat| field_after_name(&stat, 17)?.parse().ok())
        .unwrap_or(0)
}

/// The resident bytes that belong to no file on a disk. Pages that several processes share count for each of them.
pub fn resident_memory_of(pid: i32) -> u64 {
    let status = std::fs::read(format!("/proc/{pid}/status")).unwrap_or_default();
    bytes_in(&status, ["RssAnon:", "RssShmem:"])
}

/// As [`resident_memory_of`], but each page counts once, divided between those that share it.
pub fn proportional_memory_of(pid: i32) -> u64 {
    let Ok(rollup) = std::fs::read(format!("/proc/{pid}/smaps_rollup")) else {
        return resident_memory_of(pid);
    };
    bytes_in(&rollup, ["Pss_Anon:", "Pss_Shmem:"])
}

/// The sum of these lines of a file with lines such as `RssAnon:  152 kB`.
fn bytes_in(text: &[u8], names: [&str; 2]) -> u64 {
    // The name of a process may be no UTF-8.
    let text = String::from_utf8_lossy(text);
    let values = text
        .lines()
        .filter_map(|line| names.iter().find_map(|name| line.strip_prefix(*name)));
    let kibibytes = values.filter_map(|it| it.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kibibytes.sum::<u64>() << 10
}

/// Every process with its parent.
fn parents() -> Vec<(i32, i32)> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(|pid| Some((pid, parent_of(pid)?)))
        .collect()
}

fn parent_of(pid: i32) -> Option<i32> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    parent_in(&stat)
}

/// The parent in `/proc/<pid>/stat` (proc_pid_stat(5)).
fn parent_in(stat: &[u8]) -> Option<i32> {
    field_after_name(stat, 1)?.parse().ok()
}

/// A field of `/proc/<pid>/stat`, counted from the one after the name. The name is in parentheses, which it may itself
/// contain.
fn field_after_name(stat: &[u8], index: usize) -> Option<&str> {
    let name_end = stat.iter().rposition(|byte| *byte == b')')?;
    let rest = std::str::from_utf8(stat.get(name_end + 1..)?).ok()?;
    rest.split_ascii_whitespace().nth(index)
}

/// The descendants of `root` with their parents; parents come before their children.
fn descendants(root: i32, parents: &[(i32, i32)]) -> Vec<(i32, i32)> {
    let mut children: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
    for (pid, parent) in parents {
        children.entry(*parent).or_default().push(*pid);
    }
    let (mut descendants, mut seen) = (Vec::new(), BTreeSet::from([root]));
    let mut pending = vec![root];
    while let Some(parent) = pending.pop() {
        for pid in children.remove(&parent).unwrap_or_default() {
            // The list was read while processes changed, so it may even contain cycles.
            if seen.insert(pid) {
                descendants.push((pid, parent));
                pending.push(pid);
            }
        }
    }
    descendants
}

#[cfg(test)]
mod tests {
    use super::{descendants, parent_in};

    #[test]
    fn a_process_name_cannot_forge_the_parent() {
        assert_eq!(parent_in(b"7 (sh) S 3 7 7 0"), Some(3));
        assert_eq!(parent_in(b"7 (a) S 1 (b) R 4 7 7"), Some(4));
        assert_eq!(parent_in(b"7 (sh"), None);
        assert_eq!(parent_in(b""), None);
    }

    #[test]
    fn only_descendants_are_found() {
        let parents = [(2, 1), (3, 2), (4, 3), (5, 1), (6, 2), (8, 9), (9, 8)];
        let mut pairs = descendants(2, &parents);
        pairs.sort_unstable();
        assert_eq!(pairs, [(3, 2), (4, 3), (6, 2)]);
        assert_eq!(descendants(8, &parents), [(9, 8)]);
    }
}
