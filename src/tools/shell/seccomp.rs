//! The system calls that a confined command may not make: those that reach what Landlock does not cover. All others are
//! allowed.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Length, SeccompCmpOp as Is, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

/// Programs of the x32 ABI set this bit in system call numbers. They run under the same filter.
#[cfg(target_arch = "x86_64")]
const X32_SYSCALL_BIT: i64 = 0x4000_0000;
/// Set-user-ID and set-group-ID.
const SET_ID_BITS: [u64; 2] = [0o4000, 0o2000];
/// Masks the flags in a socket's type.
const SOCKET_TYPE_MASK: u64 = 0xf;

/// Commands never need these calls, and each is a way out of the sandbox: into other processes, to sockets without
/// `socket`, to keys and shared memory of the daemon's user, or to another view of the file system.
const DENIED_CALLS: &[i64] = &[
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_shmget,
    libc::SYS_shmat,
    libc::SYS_shmctl,
    libc::SYS_semget,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_semctl,
    // A process that knows a queue's number needs no msgget.
    libc::SYS_msgget,
    libc::SYS_msgsnd,
    libc::SYS_msgrcv,
    libc::SYS_msgctl,
    libc::SYS_mq_open,
    libc::SYS_mq_unlink,
    libc::SYS_syslog,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fsmount,
    libc::SYS_mount_setattr,
    libc::SYS_open_by_handle_at,
    libc::SYS_unshare,
    libc::SYS_setns,
];

/// These calls take a process in the given argument. Only 0, the caller itself, is allowed.
const PROCESS_TARGET_CALLS: &[(i64, u8)] = &[
    (libc::SYS_prlimit64, 0),
    (libc::SYS_sched_setaffinity, 0),
    (libc::SYS_sched_setscheduler, 0),
    (libc::SYS_sched_setparam, 0),
    (libc::SYS_sched_setattr, 0),
    (libc::SYS_setpriority, 1),
    (libc::SYS_ioprio_set, 1),
];

/// In these calls this value of the first argument selects all processes of a user: `PRIO_USER` and `IOPRIO_WHO_USER`.
const USER_TARGET_CALLS: &[(i64, u64)] = &[(libc::SYS_setpriority, 2), (libc::SYS_ioprio_set, 3)];

/// These calls make the kernel send a signal when a file is ready; the second argument selects the operation.
/// `F_SETOWN`, `F_SETSIG`, `F_SETOWN_EX`, `FIOSETOWN` and `SIOCSPGRP` are the same on every supported architecture.
const FILE_SIGNAL_CALLS: &[(i64, u64)] = &[
    (libc::SYS_fcntl, 8),
    (libc::SYS_fcntl, 10),
    (libc::SYS_fcntl, 15),
    (libc::SYS_ioctl, 0x8901),
    (libc::SYS_ioctl, 0x8902),
];

const SIGNAL_CALLS: &[i64] = &[
    libc::SYS_kill,
    libc::SYS_tkill,
    libc::SYS_tgkill,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_pidfd_send_signal,
];

/// Calls that create files or change permissions, with the argument that holds the mode.
const FILE_MODE_CALLS: &[(i64, u8)] = &[
    (libc::SYS_fchmod, 1),
    (libc::SYS_fchmodat, 2),
    (FCHMODAT2, 2),
    (libc::SYS_mknodat, 2),
    (libc::SYS_openat, 3),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_chmod, 1),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_mknod, 1),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_open, 2),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_creat, 1),
];

/// The same number on every architecture.
const FCHMODAT2: i64 = 452;

/// Why a process is not under the filter.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    #[error("the filter of system calls cannot be built: {0}")]
    Build(#[from] seccompiler::BackendError),
    #[error("its system calls cannot be filtered: {0}")]
    Apply(#[from] seccompiler::Error),
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Applies the filter to this thread, and to everything that it executes. It cannot be removed.
pub fn apply(allow_network: bool, has_scoped_signals: bool) -> Result<(), FilterError> {
    for program in build_programs(allow_network, has_scoped_signals)? {
        seccompiler::apply_filter(&program)?;
    }
    Ok(())
}

fn build_programs(
    allow_network: bool,
    has_scoped_signals: bool,
) -> Result<[BpfProgram; 2], seccompiler::BackendError> {
    let denied = denied_rules(allow_network, has_scoped_signals)?;
    Ok([
        build_program(denied, libc::EPERM)?,
        build_program(unsupported_rules(), libc::ENOSYS)?,
    ])
}

/// Calls that fail as if the kernel did not have them. Their arguments are in memory, where a filter cannot read them,
/// and programs fall back to the older calls.
fn unsupported_rules() -> Rules {
    let calls = [libc::SYS_clone3, libc::SYS_openat2];
    calls.map(|call| (call, Vec::new())).into()
}

fn denied_rules(
    allow_network: bool,
    has_scoped_signals: bool,
) -> Result<Rules, seccompiler::BackendError> {
    let mut rules: Rules = DENIED_CALLS
        .iter()
        .map(|call| (*call, Vec::new()))
        .collect();
    if !has_scoped_signals {
        rules.extend(SIGNAL_CALLS.iter().map(|call| (*call, Vec::new())));
        for (call, operation) in FILE_SIGNAL_CALLS {
            let denied = rule(&[(1, Is::Eq, *operation)])?;
            rules.entry(*call).or_default().push(denied);
        }
    }
    for (call, argument) in PROCESS_TARGET_CALLS {
        rules.insert(*call, vec![rule(&[(*argument, Is::Ne, 0)])?]);
    }
    for (call, user) in USER_TARGET_CALLS {
        let denied = rule(&[(0, Is::Eq, *user)])?;
        rules.entry(*call).or_default().push(denied);
    }
    for (call, argument) in FILE_MODE_CALLS {
        let rule = |bit| rule(&[(*argument, Is::MaskedEq(bit), bit)]);
        rules.insert(
            *call,
            SET_ID_BITS
                .into_iter()
                .map(rule)
                .collect::<Result<_, _>>()?,
        );
    }
    let user_namespace = u64::from(libc::CLONE_NEWUSER.unsigned_abs());
    let clone = rule(&[(0, Is::MaskedEq(user_namespace), user_namespace)])?;
    rules.insert(libc::SYS_clone, vec![clone]);
    let family = |family: libc::c_int| u64::from(family.unsigned_abs());
    let [local, netlink] = [libc::AF_UNIX, libc::AF_NETLINK].map(family);
    let [v4, v6] = [libc::AF_INET, libc::AF_INET6].map(family);
    let sockets = match allow_network {
        // Local sockets reach other programs of this machine, with or without network access.
        true => vec![
            rule(&[(0, Is::Ne, v4), (0, Is::Ne, v6), (0, Is::Ne, netlink)])?,
            // Protocol 0 (NETLINK_ROUTE) reads this machine's addresses. Other protocols change the system.
            rule(&[(0, Is::Eq, netlink), (2, Is::Ne, 0)])?,
        ],
        false => Vec::new(),
    };
    rules.insert(libc::SYS_socket, sockets);
    // A connected pair is allowed. A pair of datagram sockets could be sent elsewhere.
    let connected_types = [libc::SOCK_STREAM, libc::SOCK_SEQPACKET].map(family);
    let other_types = (0..=SOCKET_TYPE_MASK).filter(|kind| !connected_types.contains(kind));
    let pairs = other_types.map(|kind| rule(&[(1, Is::MaskedEq(SOCKET_TYPE_MASK), kind)]));
    let mut pairs: Vec<_> = pairs.collect::<Result<_, _>>()?;
    pairs.push(rule(&[(0, Is::Ne, local)])?);
    rules.insert(libc::SYS_socketpair, pairs);
    Ok(rules)
}

/// Matches if all comparisons hold: the argument's index, the operator and the value.
fn rule(comparisons: &[(u8, Is, u64)]) -> Result<SeccompRule, seccompiler::BackendError> {
    let conditions = comparisons.iter().map(|(argument, operator, value)| {
        SeccompCondition::new(*argument, Length::Dword, operator.clone(), *value)
    });
    SeccompRule::new(conditions.collect::<Result<_, _>>()?)
}

fn build_program(
    rules: Rules,
    errno: libc::c_int,
) -> Result<BpfProgram, seccompiler::BackendError> {
    let action = SeccompAction::Errno(errno.unsigned_abs());
    let filter = SeccompFilter::new(
        for_all_abis(rules),
        SeccompAction::Allow,
        action,
        TargetArch::try_from(std::env::consts::ARCH)?,
    )?;
    filter.try_into()
}

/// Repeats the rules for every ABI of this architecture. Calls of other ABIs kill the process.
fn for_all_abis(rules: Rules) -> Rules {
    #[cfg(target_arch = "x86_64")]
    {
        // No supported program uses the x32 ABI, so its own numbers are denied whatever they mean.
        let shared = rules
            .iter()
            .map(|(call, rules)| (call | X32_SYSCALL_BIT, rules.clone()));
        let x32_only = (512..=547).map(|call| (call | X32_SYSCALL_BIT, Vec::new()));
        let x32_rules: Vec<_> = shared.chain(x32_only).collect();
        rules.into_iter().chain(x32_rules).collect()
    }
    #[cfg(not(target_arch = "x86_64"))]
    rules
}

#[cfg(test)]
mod tests {
    use super::{apply, build_programs};

    #[test]
    fn every_filter_can_be_built() {
        for network in [true, false] {
            for has_scoped_signals in [true, false] {
                let [denied, unsupported] =
                    build_programs(network, has_scoped_signals).expect("programs");
                assert!(denied.len() > unsupported.len());
            }
        }
    }

    // Kernels before 6.12 cannot scope signals, and send a pipe's signal to any process of the same user.
    #[test]
    fn without_scoped_signals_no_file_sends_one() {
        let python = "/usr/bin/python3";
        if !std::path::Path::new(python).exists() {
            return;
        }
        let code = "import fcntl, os, termios\n\
                    end = os.pipe()[0]\n\
                    for call in 'F_SETOWN', 'F_SETSIG':\n\
                    \x20try: fcntl.fcntl(end, getattr(fcntl, call), os.getpid()); print(call)\n\
                    \x20except PermissionError: pass\n\
                    fcntl.fcntl(end, fcntl.F_SETFL, os.O_NONBLOCK)";
        // The filter applies to this thread and its children.
        let thread = std::thread::spawn(move || {
            apply(false, false).expect("a filter");
            let mut command = std::process::Command::new(python);
            command.args(["-c", code]).output().expect("python")
        });
        let output = thread.join().expect("a thread");
        assert!(
            output.status.success() && output.stdout.is_empty(),
            "{output:?}"
        );
    }
}
