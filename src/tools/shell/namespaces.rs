//! A process namespace for the processes that this process starts from now on. When the first of them ends, the kernel
//! ends all others.

use nix::sched::{CloneFlags, unshare};
use rustix::process::{getgid, getuid};

/// Needs the capability `SYS_ADMIN`.
///
/// # Errors
/// This process may not have such a namespace. Nothing has changed.
pub fn enter_pid_namespace() -> Result<(), String> {
    unshare(CloneFlags::CLONE_NEWPID).map_err(|error| error.to_string())
}

/// Enters a user namespace as well, which needs no capability. Its only user and group are those of this process, so
/// files belong to them inside as well as outside.
///
/// # Errors
/// The system does not allow it.
pub fn enter_user_and_pid_namespaces() -> Result<(), String> {
    let (user, group) = (getuid().as_raw(), getgid().as_raw());
    unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWPID)
        .map_err(|error| error.to_string())?;
    let write = |file: &str, text: &str| {
        std::fs::write(format!("/proc/self/{file}"), text)
            .map_err(|error| format!("{file}: {error}"))
    };
    // Otherwise the kernel does not let an unprivileged process map its group (user_namespaces(7)).
    write("setgroups", "deny")?;
    write("uid_map", &format!("{user} {user} 1"))?;
    write("gid_map", &format!("{group} {group} 1"))
}
