//! Confines this process for good, before it becomes a command: by Landlock what files it reaches, by a filter of system
//! calls what Landlock does not cover. Knows no command.

use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, RulesetStatus, Scope, path_beneath_rules,
};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

use crate::tools::shell::seccomp;
use crate::workdirs::file_id::FileId;
use crate::workdirs::reserved::{ReservedPaths, ReservedSnapshot};

/// The first of which no write gets by: earlier ones let files be cut short anywhere. Linux 6.2.
const REQUIRED_ABI: ABI = ABI::V3;

/// Read and executed. `/usr` stands here by what is in it, but for the folders below it that are not the system's own.
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
/// In these everything but [`NOT_SYSTEM`].
const SYSTEM_PARENTS: &[&str] = &["/usr", "/usr/local"];
/// May have the configuration of services, such as ours.
const EXCLUDED_NAMES: &[&str] = &["etc", "local"];
/// Of `/etc` what programs need and what holds no secret.
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
/// Of `/proc` what tells of the machine and of no process.
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
/// Devices that are read, the first also written.
const DEVICE_PATHS: &[&str] = &[
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/urandom",
];

/// Most paths that commands are allowed to read: each command allows each of them anew.
const MAX_READABLE_PATHS: usize = 4096;

/// Whether this system can confine.
pub fn is_available() -> bool {
    let ruleset = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    let ruleset = ruleset.handle_access(AccessFs::from_all(REQUIRED_ABI));
    ruleset.and_then(Ruleset::create).is_ok()
}

/// Confines this process: it writes in its working directory and in `temporary`, and reads nothing that is reserved.
///
/// # Errors
/// Why it is not confined. Then it must not go on.
pub fn confine(temp_dir: &Path, allow_network: bool, reserved: Vec<PathBuf>) -> Result<(), String> {
    let no_capabilities = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    close_inherited_files().map_err(|error| format!("its files cannot be closed: {error}"))?;
    set_capabilities(None, no_capabilities)
        .map_err(|error| format!("its privileges cannot be dropped: {error}"))?;
    let readable_paths = readable_paths(&ReservedPaths::from_paths(reserved).snapshot())?;
    let status = apply_landlock(temp_dir, allow_network, readable_paths);
    let status = status.map_err(|error| format!("Landlock cannot confine it: {error}"))?;
    if status == RulesetStatus::NotEnforced {
        return Err("Landlock does not confine it".to_owned());
    }
    seccomp::apply(allow_network, can_scope_signals())
}

/// Closes what whoever started the daemon left open for it and for all that it starts: Landlock lets what is open be.
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
        // The one that was read here is closed by now.
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
        // What later kernels add.
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
        // What this machine does not have is passed over.
        .add_rules(path_beneath_rules(readable_paths, read_access))?
        .add_rules(path_beneath_rules(
            [null],
            read_access | AccessFs::WriteFile,
        ))?
        .add_rules(path_beneath_rules(writable_paths, write_access))?;
    Ok(created.restrict_self()?.ruleset)
}

/// What every command reads and executes: the system's files without what is reserved.
///
/// # Errors
/// Where that cannot be left out.
pub fn readable_paths(reserved: &ReservedSnapshot) -> Result<Vec<PathBuf>, String> {
    let mut paths = Vec::new();
    for path in system_paths() {
        add_unreserved(path, reserved, &mut paths)?;
    }
    Ok(paths)
}

/// Adds this path; in its place what is in it, where something of that is reserved.
fn add_unreserved(
    path: PathBuf,
    reserved: &ReservedSnapshot,
    paths: &mut Vec<PathBuf>,
) -> Result<(), String> {
    let Ok(meta) = std::fs::metadata(&path) else {
        return Ok(());
    };
    let Some(reserved_path) = reserved.reserved_path_within(FileId::from_std(&meta)) else {
        paths.push(path);
        return Ok(());
    };
    // What is behind a link is one of the other paths, or no path of the system's.
    let can_descend =
        meta.is_dir() && !path.is_symlink() && !reserved.is_forbidden(FileId::from_std(&meta));
    if !can_descend {
        return Ok(());
    }
    let entries = std::fs::read_dir(&path).into_iter().flatten().flatten();
    for entry in entries {
        if paths.len() > MAX_READABLE_PATHS {
            return Err(format!(
                "{} is the server's own and lies in {}, which commands read and which has too many entries to leave it \
                 out; move it elsewhere",
                reserved_path.display(),
                path.display()
            ));
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
