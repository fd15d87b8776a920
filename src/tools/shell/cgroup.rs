//! Control groups for the processes of one command, where the daemon may create some beside or below its own: one of
//! cgroup v2, and one of cgroup v1 for the number of processes if only that has the controller.

use std::ffi::{OsStr, OsString};
use std::io::{Error, ErrorKind};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use crate::tools::shell::limits::Limits;

/// If the daemon's own group has this name, it is a leaf of a subtree that was delegated to the daemon (systemd's
/// `DelegateSubgroup`), so the commands' groups lie beside it. Controllers apply only to groups whose parent has no
/// processes of its own.
const LEAF_NAME: &str = "daemon";
/// The share of the processor of one command. The daemon itself has 100.
const CPU_WEIGHT: u32 = 20;
const REMOVAL_ATTEMPTS: u32 = 50;
const REMOVAL_INTERVAL: Duration = Duration::from_millis(2);

/// Groups of one command. Their creator removes them when the processes are gone.
#[derive(Debug, Default)]
pub struct Cgroup {
    /// One for each hierarchy. Empty if the daemon may create none.
    dirs: Vec<PathBuf>,
}

impl Cgroup {
    /// Creates empty groups with as many of the limits as the daemon's own groups have controllers for, and only those
    /// that limit something or, if `must_kill`, can kill their processes (Linux 5.14).
    pub fn create(limits: &Limits, must_kill: bool) -> Self {
        let mut group = Self::default();
        let Ok(id) = getrandom::u64() else {
            return group;
        };
        let name = format!("axed-command-{id:016x}");
        if let Ok(dir) = create_v2(&name) {
            let _ = write_existing(
                &dir.join("pids.max"),
                &limits.kernel_processes().to_string(),
            );
            let _ = write_existing(&dir.join("memory.max"), &limits.memory.to_string());
            // Only systems that can swap have it.
            let _ = write_existing(&dir.join("memory.swap.max"), "0");
            let _ = write_existing(&dir.join("cpu.weight"), &CPU_WEIGHT.to_string());
            group.dirs.push(dir);
            let is_useful = group.limits_processes() || group.limits_memory();
            if !(is_useful || must_kill && group.can_kill()) {
                group.remove();
                group.dirs.clear();
            }
        }
        if !group.limits_processes() {
            group.dirs.extend(create_v1(&name, limits).ok());
        }
        group
    }

    /// Reads what [`Self::to_list`] returned.
    pub fn from_list(dirs: &OsStr) -> Self {
        let dirs = std::env::split_paths(dirs);
        Self {
            dirs: dirs.filter(|dir| !dir.as_os_str().is_empty()).collect(),
        }
    }

    /// The directories, separated by colons.
    pub fn to_list(&self) -> OsString {
        // Only a colon in a path is an error, and no group has one.
        std::env::join_paths(&self.dirs).unwrap_or_default()
    }

    pub fn limits_processes(&self) -> bool {
        self.has_limit("pids.max")
    }

    pub fn limits_memory(&self) -> bool {
        self.has_limit("memory.max")
    }

    fn has_limit(&self, file: &str) -> bool {
        let mut values = self.dirs.iter().map(|dir| dir.join(file));
        values.any(|path| {
            std::fs::read_to_string(path)
                .is_ok_and(|value| value.trim_ascii().parse::<u64>().is_ok())
        })
    }

    /// Whether the command has tried to start more processes than the kernel allows it. Before Linux 6.11 the kernel also
    /// counts what a group above has rejected, so the command must have too many processes itself.
    pub fn has_rejected_process(&self, limits: &Limits) -> bool {
        self.dirs.iter().any(|dir| {
            let read = |file| std::fs::read_to_string(dir.join(file)).unwrap_or_default();
            let events = read("pids.events");
            let mut counts = events.lines().filter_map(|line| line.strip_prefix("max "));
            let processes = || read("pids.current").trim_ascii().parse::<usize>();
            counts.any(|count| count != "0") && processes().is_ok_and(|it| it > limits.processes)
        })
    }

    pub fn can_kill(&self) -> bool {
        self.dirs.iter().any(|dir| dir.join("cgroup.kill").exists())
    }

    /// Moves this process into the groups.
    ///
    /// # Errors
    /// One of them is gone or belongs to somebody else.
    pub fn enter(&self) -> std::io::Result<()> {
        let mut files = self.dirs.iter().map(|dir| dir.join("cgroup.procs"));
        files.try_for_each(|file| write_existing(&file, "0"))
    }

    /// Sends SIGKILL to all processes of the group at once. None of them can start another one meanwhile.
    pub fn kill(&self) {
        for dir in &self.dirs {
            let _ = write_existing(&dir.join("cgroup.kill"), "1");
        }
    }

    pub fn remove(&self) {
        for dir in &self.dirs {
            // A process that was waited for may still be counted for a moment.
            for _ in 0..REMOVAL_ATTEMPTS {
                match std::fs::remove_dir(dir) {
                    Err(error) if error.kind() == ErrorKind::ResourceBusy => {
                        std::thread::sleep(REMOVAL_INTERVAL);
                    }
                    _ => break,
                }
            }
        }
    }
}

fn write_existing(path: &Path, text: &str) -> std::io::Result<()> {
    let mut file = std::fs::OpenOptions::new().write(true).open(path)?;
    std::io::Write::write_all(&mut file, text.as_bytes())
}

/// Creates a group of cgroup v2, with the controllers that its parent can pass on.
fn create_v2(name: &str) -> std::io::Result<PathBuf> {
    let own = own_dir(None)?;
    let parent = match own.parent() {
        Some(parent) if own.file_name().is_some_and(|name| name == LEAF_NAME) => parent,
        _ => &own,
    };
    for controller in ["+pids", "+memory", "+cpu"] {
        let _ = write_existing(&parent.join("cgroup.subtree_control"), controller);
    }
    let dir = parent.join(name);
    std::fs::create_dir(&dir)?;
    Ok(dir)
}

/// Creates a group of cgroup v1 that limits the number of processes.
fn create_v1(name: &str, limits: &Limits) -> std::io::Result<PathBuf> {
    let dir = own_dir(Some("pids"))?.join(name);
    std::fs::create_dir(&dir)?;
    let written = write_existing(
        &dir.join("pids.max"),
        &limits.kernel_processes().to_string(),
    );
    if written.is_err() {
        let _ = std::fs::remove_dir(&dir);
    }
    written.map(|()| dir)
}

/// The directory of this process's group: in cgroup v2, or in the hierarchy of v1 that has the controller.
fn own_dir(controller: Option<&str>) -> std::io::Result<PathBuf> {
    let groups = std::fs::read_to_string("/proc/self/cgroup")?;
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
    find_own_dir(controller, &groups, &mounts).ok_or_else(|| Error::from(ErrorKind::Unsupported))
}

/// Reads `/proc/self/cgroup` (cgroups(7)) and `/proc/self/mountinfo` (proc_pid_mountinfo(5)).
fn find_own_dir(controller: Option<&str>, groups: &str, mounts: &str) -> Option<PathBuf> {
    let is_in = |list: &str, name: &str| list.split(',').any(|it| it == name);
    let group = groups.lines().find_map(|line| {
        let (hierarchy, rest) = line.split_once(':')?;
        let (names, path) = rest.split_once(':')?;
        let is_searched = match controller {
            None => hierarchy == "0",
            Some(controller) => is_in(names, controller),
        };
        is_searched.then_some(path)
    })?;
    mounts.lines().find_map(|line| {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let (root, mount_point) = (fields.next()?, fields.next()?);
        let mut fields = file_system.split(' ');
        let (kind, options) = (fields.next()?, fields.nth(1).unwrap_or_default());
        let is_searched = match controller {
            None => kind == "cgroup2",
            Some(controller) => kind == "cgroup" && is_in(options, controller),
        };
        let relative = Path::new(group).strip_prefix(root).ok()?;
        // A group outside of this process's view begins with "..".
        let is_inside = relative
            .components()
            .all(|component| matches!(component, Component::Normal(_)));
        let dir = Path::new(mount_point).join(relative);
        // Groups are passed on as a list.
        let is_listable = std::env::join_paths([&dir]).is_ok();
        (is_searched && is_inside && is_listable).then_some(dir)
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{Cgroup, find_own_dir};
    use crate::tools::shell::limits::Limits;

    #[test]
    fn a_rejection_by_a_group_above_is_not_the_commands() {
        let dir = tempfile::tempdir().expect("a directory");
        let group = Cgroup {
            dirs: vec![dir.path().to_owned()],
        };
        let limits = Limits {
            processes: 10,
            memory: 1,
        };
        for (events, processes, is_rejected) in [
            ("max 0\n", "11\n", false),
            ("max 3\n", "10\n", false),
            ("max 3\n", "11\n", true),
        ] {
            std::fs::write(dir.path().join("pids.events"), events).expect("a file");
            std::fs::write(dir.path().join("pids.current"), processes).expect("a file");
            assert_eq!(group.has_rejected_process(&limits), is_rejected);
        }
    }

    #[test]
    fn the_group_is_found_where_it_is_mounted() {
        let mounts = "30 1 0:27 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n\
                      31 1 0:28 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw";
        let unified = |groups| find_own_dir(None, groups, mounts);
        let groups = "8:pids:/a\n0::/system.slice/axed.service/daemon\n";
        assert_eq!(
            unified(groups).as_deref(),
            Some(Path::new("/sys/fs/cgroup/system.slice/axed.service/daemon"))
        );
        let pids = find_own_dir(Some("pids"), groups, mounts);
        assert_eq!(pids.as_deref(), Some(Path::new("/sys/fs/cgroup/pids/a")));
        assert_eq!(find_own_dir(Some("memory"), groups, mounts), None);
        assert_eq!(
            unified("0::/\n").as_deref(),
            Some(Path::new("/sys/fs/cgroup/"))
        );
        assert_eq!(unified("0::/../other\n"), None);
        assert_eq!(unified("8:pids:/a\n"), None);
        assert_eq!(unified("0::/a:b\n"), None);
        let part = "31 1 0:28 /docker/a /sys/fs/cgroup ro - cgroup2 cgroup2 rw";
        let inside = find_own_dir(None, "0::/docker/a/b\n", part);
        assert_eq!(inside.as_deref(), Some(Path::new("/sys/fs/cgroup/b")));
        assert_eq!(find_own_dir(None, "0::/docker/c\n", part), None);
    }
}
