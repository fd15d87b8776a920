//! Confines this process before it becomes a command: Landlock limits the files that it reaches, a system call filter
//! covers the rest.

use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, RulesetStatus, Scope, path_beneath_rules,
};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, getpid, getppid, kill_process_group, test_kill_process};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

use crate::tools::shell::limits::Isolation;
use crate::tools::shell::seccomp::{self, FilterError};
use crate::workdirs::file_id::FileId;
use crate::workdirs::reserved::{ReservedPaths, ReservedSnapshot};

/// The first ABI that controls every write (Linux 6.2). Earlier ones allow truncating any file.
const REQUIRED_ABI: ABI = ABI::V3;

/// Paths that commands read and execute. `/usr` is not listed itself, because of its folders that are not part of the
/// system.
const SYSTEM_PATHS: &[&str] = &[
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/nix/store",
    "/sys/devices/system/cpu",
];
/// In these folders, everything but [`EXCLUDED_NAMES`].
const SYSTEM_PARENTS: &[&str] = &["/usr", "/usr/local"];
/// Folders that may hold the configuration of services, such as this one.
const EXCLUDED_NAMES: &[&str] = &["etc", "local"];
/// The files in `/etc` that programs need and that hold no secret.
const ETC_NAMES: &[&str] = &[
    "alternatives",
    "ca-certificates",
    "ca-certificates.conf",
    "crypto-policies",
    "fonts",
    "gai.conf",
    "gitconfig",
    "group",
    "host.conf",
    "hosts",
    "inputrc",
    "java",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "locale.conf",
    "localtime",
    "magic",
    "mime.types",
    "networks",
    "nsswitch.conf",
    "os-release",
    "passwd",
    "perl",
    "pki/ca-trust",
    "pki/tls/cert.pem",
    "pki/tls/certs",
    "pki/tls/openssl.cnf",
    "profile",
    "profile.d",
    "protocols",
    "python3",
    "python3.11",
    "python3.12",
    "python3.13",
    "resolv.conf",
    "services",
    "shells",
    "ssl/cert.pem",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
];
/// The files in `/proc` that describe the machine and no process.
const PROC_NAMES: &[&str] = &[
    "cpuinfo",
    "filesystems",
    "loadavg",
    "meminfo",
    "stat",
    "sys",
    "uptime",
    "version",
];
/// Devices that commands read. They also write the first.
const DEVICE_PATHS: &[&str] = &[
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/urandom",
];

/// Most paths that commands may read: each command opens each of them.
const MAX_READABLE_PATHS: usize = 4096;

/// Why a process cannot be confined.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    #[error("its files cannot be closed: {0}")]
    InheritedFiles(std::io::Error),
    #[error("its privileges cannot be dropped: {0}")]
    Privileges(Errno),
    #[error("Landlock cannot confine it: {0}")]
    Landlock(#[from] RulesetError),
    #[error("Landlock does not confine it")]
    NotEnforced,
    #[error(transparent)]
    SystemCalls(#[from] FilterError),
    #[error(
        "{} is the server's own and lies in {}, which commands read and which has too many entries to leave it out; move \
         it elsewhere", .reserved.display(), .parent.display()
    )]
    TooManyPaths { reserved: PathBuf, parent: PathBuf },
}

/// Whether this system supports the sandbox.
pub fn is_available() -> bool {
    let ruleset = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    let ruleset = ruleset.handle_access(AccessFs::from_all(REQUIRED_ABI));
    ruleset.and_then(Ruleset::create).is_ok()
}

/// Proof that a signal to everybody reaches only what this process has started.
pub struct SignalScope(());

impl SignalScope {
    /// Enters a Landlock domain that restricts nothing but signals. The command's domain lies within it, so the command
    /// cannot signal this process. `None` on systems that cannot scope signals (before Linux 6.12).
    pub fn enter() -> Option<Self> {
        let ruleset = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
        let domain = ruleset.scope(Scope::Signal).and_then(Ruleset::create);
        let status = domain.and_then(|domain| domain.restrict_self()).ok()?;
        Self::of(Isolation::SignalScope).filter(|_| status.ruleset == RulesetStatus::FullyEnforced)
    }

    /// Tries whether this process is isolated in such a way, because `signal_all` would otherwise end every process of
    /// the machine.
    pub fn of(isolation: Isolation) -> Option<Self> {
        let is_scoped = match isolation {
            Isolation::PidNamespace | Isolation::UserNamespace => getpid().is_init(),
            Isolation::SignalScope => test_kill_process(getppid()?) == Err(Errno::PERM),
            Isolation::ControlGroup | Isolation::None => false,
        };
        is_scoped.then_some(Self(()))
    }

    /// Sends the signal to all descendants at once. Until it arrives, none of them can start another process.
    pub fn signal_all(&self, signal: Signal) {
        // `kill(-1, …)`: everything that this process may signal, except itself.
        let _ = kill_process_group(Pid::INIT, signal);
    }
}

/// Confines this process: it writes only in its working directory and in `temp_dir`, and reads nothing that is
/// reserved.
///
/// # Errors
/// The process is not confined, and must not execute the command.
pub fn confine(
    temp_dir: &Path,
    allow_network: bool,
    has_namespace: bool,
    reserved: Vec<PathBuf>,
) -> Result<(), SandboxError> {
    let no_capabilities = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    close_inherited_files().map_err(SandboxError::InheritedFiles)?;
    set_capabilities(None, no_capabilities).map_err(SandboxError::Privileges)?;
    let readable_paths = readable_paths(&ReservedPaths::from_paths(reserved).snapshot())?;
    let status = apply_landlock(temp_dir, allow_network, readable_paths)?;
    if status == RulesetStatus::NotEnforced {
        return Err(SandboxError::NotEnforced);
    }
    let has_scoped_signals = has_namespace || can_scope_signals();
    Ok(seccomp::apply(allow_network, has_scoped_signals)?)
}

/// Closes files that the daemon inherited when it was started. Landlock does not restrict files that are already open.
fn close_inherited_files() -> std::io::Result<()> {
    let mut open_fds: Vec<i32> = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd")? {
        open_fds.extend(
            entry?
                .file_name()
                .to_str()
                .and_then(|name| name.parse::<i32>().ok()),
        );
    }
    for fd in open_fds.into_iter().filter(|file| *file > 2) {
        // The descriptor of this listing is among them and is closed already.
        let _ = nix::unistd::close(fd);
    }
    Ok(())
}

fn can_scope_signals() -> bool {
    let ruleset = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    ruleset
        .scope(Scope::Signal)
        .and_then(Ruleset::create)
        .is_ok()
}

fn apply_landlock(
    temp_dir: &Path,
    allow_network: bool,
    readable_paths: Vec<PathBuf>,
) -> Result<RulesetStatus, RulesetError> {
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(REQUIRED_ABI))?
        // Rights that later kernels add.
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::IoctlDev)?
        .scope(Scope::Signal | Scope::AbstractUnixSocket)?;
    if !allow_network {
        ruleset = ruleset.handle_access(AccessNet::from_all(ABI::V4))?;
    }
    let read_access = AccessFs::from_read(REQUIRED_ABI);
    let write_access =
        AccessFs::from_all(REQUIRED_ABI) & !(AccessFs::MakeChar | AccessFs::MakeBlock);
    let writable_paths = [Path::new("."), temp_dir];
    let null = Path::new("/dev/null");
    let created = ruleset
        .create()?
        .set_compatibility(CompatLevel::HardRequirement)
        // Paths that this machine does not have are skipped.
        .add_rules(path_beneath_rules(readable_paths, read_access))?
        .add_rules(path_beneath_rules(
            [null],
            read_access | AccessFs::WriteFile,
        ))?
        .add_rules(path_beneath_rules(writable_paths, write_access))?;
    Ok(created.restrict_self()?.ruleset)
}

/// The paths that every command may read and execute: the system's files without the reserved ones.
///
/// # Errors
/// Too many paths would be needed to leave a reserved one out.
pub fn readable_paths(reserved: &ReservedSnapshot) -> Result<Vec<PathBuf>, SandboxError> {
    let mut paths = Vec::new();
    for path in system_paths() {
        add_unreserved(path, reserved, &mut paths)?;
    }
    Ok(paths)
}

/// Adds this path. If it contains something reserved, adds its entries one by one instead.
fn add_unreserved(
    path: PathBuf,
    reserved: &ReservedSnapshot,
    paths: &mut Vec<PathBuf>,
) -> Result<(), SandboxError> {
    let Ok(meta) = std::fs::metadata(&path) else {
        return Ok(());
    };
    let Some(reserved_path) = reserved.reserved_path_within(FileId::from_std(&meta)) else {
        paths.push(path);
        return Ok(());
    };
    // The target of a link is another path of this list, or no system path.
    let can_descend =
        meta.is_dir() && !path.is_symlink() && !reserved.is_forbidden(FileId::from_std(&meta));
    if !can_descend {
        return Ok(());
    }
    let entries = std::fs::read_dir(&path).into_iter().flatten().flatten();
    for entry in entries {
        if paths.len() > MAX_READABLE_PATHS {
            return Err(SandboxError::TooManyPaths {
                reserved: reserved_path.clone(),
                parent: path,
            });
        }
        add_unreserved(entry.path(), reserved, paths)?;
    }
    Ok(())
}

fn system_paths() -> Vec<PathBuf> {
    let children = |parent: &str, names: &[&str]| -> Vec<PathBuf> {
        let parent = Path::new(parent);
        names.iter().map(|name| parent.join(name)).collect()
    };
    let mut paths: Vec<PathBuf> = [SYSTEM_PATHS, DEVICE_PATHS]
        .concat()
        .iter()
        .map(PathBuf::from)
        .collect();
    paths.extend(children("/etc", ETC_NAMES));
    paths.extend(children("/proc", PROC_NAMES));
    for parent in SYSTEM_PARENTS {
        let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
        let included =
            entries.filter(|entry| !EXCLUDED_NAMES.iter().any(|name| entry.file_name() == *name));
        paths.extend(included.map(|entry| entry.path()));
    }
    paths
}
